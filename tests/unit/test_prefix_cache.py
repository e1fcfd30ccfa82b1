"""PrefixCache: what is reused equals what is computed; budget, counters, threads, files, and the wrong model."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling_k3 import K3Cache, K3Signals, PrefixCache
from modeling_k3.fingerprint import fingerprint
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
LAYERS = ("KMK", "KK", "MM")


@pytest.fixture(scope="module", params=LAYERS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(tiny_config(request.param, eos_token_id=None)).requires_grad_(False)


@pytest.fixture
def hybrid() -> Any:
    return build(tiny_config("KMK", eos_token_id=None)).requires_grad_(False)


def joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts, dim=1)


def count_tokens(model: Any) -> tuple[list[int], Callable[[], None]]:
    """Tokens that go through the model, and how to stop counting."""
    seen: list[int] = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    return seen, handle.remove


def test_a_shared_prefix_costs_only_the_rest(model: Any) -> None:
    """Three quarters in common: a quarter of the prefill, and the same output."""
    shared, prefixes = token_ids(1, 48), PrefixCache(block_size=8)
    for seed in range(3):
        prompt = joined(shared, token_ids(1, 16, seed=seed + 1))
        seen, stop = count_tokens(model)
        output = model.generate(prompt, prefix_cache=prefixes, **GREEDY)
        stop()
        assert torch.equal(output, model.generate(prompt, **GREEDY))
        assert sum(seen) == (64 if seed == 0 else 16) + 5
    stats = prefixes.stats()
    assert (stats["lookups"], stats["hits"], stats["misses"]) == (3, 2, 1)
    assert (stats["asked_tokens"], stats["hit_tokens"], stats["hit_rate"]) == (192, 96, 0.5)
    assert stats["blocks"] == stats["stored"] == 6 + 3 * 2


def test_a_repeated_prompt_keeps_its_last_token(model: Any) -> None:
    """A hit over everything would leave nothing to compute logits from."""
    prompt, prefixes = token_ids(1, 16), PrefixCache(block_size=8)
    expected = model.generate(prompt, **GREEDY)
    for _ in range(3):
        assert torch.equal(model.generate(prompt, prefix_cache=prefixes, **GREEDY), expected)
    assert prefixes.stats()["hit_tokens"] == 16 and len(prefixes) == 2


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 5}])
def test_reuse_goes_with_everything(model: Any, options: dict[str, Any]) -> None:
    prompt, prefixes = token_ids(1, 21), PrefixCache(block_size=4)
    expected = model.generate(prompt, **options, **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, prefix_cache=prefixes, **options, **GREEDY), expected)
    assert prefixes.stats()["hit_tokens"] > 0


def test_rows_share_what_all_of_them_know(model: Any) -> None:
    rows, prefixes = token_ids(2, 20), PrefixCache(block_size=4)
    model.generate(rows[:1], prefix_cache=prefixes, **GREEDY)
    expected = model.generate(rows, **GREEDY)
    assert torch.equal(model.generate(rows, prefix_cache=prefixes, **GREEDY), expected)
    assert prefixes.stats()["hit_tokens"] == 0
    assert torch.equal(model.generate(rows.flip(0), prefix_cache=prefixes, **GREEDY), expected.flip(0))
    assert prefixes.stats()["hit_tokens"] == 2 * 16


def test_padded_batches_and_begun_caches_go_past_it(model: Any) -> None:
    prefixes, ids, mask = PrefixCache(block_size=4), token_ids(2, 12), torch.ones(2, 12).long()
    mask[0, :3] = 0
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, prefix_cache=prefixes, **GREEDY), expected)
    embeds = model.get_input_embeddings()(ids)
    model.generate(inputs_embeds=embeds, prefix_cache=prefixes, **GREEDY)
    begun = K3Cache(model.config)
    model(ids[:, :5], cache=begun)
    model.generate(ids, cache=begun, prefix_cache=prefixes, **GREEDY)
    assert prefixes.stats()["bypassed"] == 3 and len(prefixes) == 0
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids, prefix_cache=prefixes, use_cache=False, **GREEDY)


def test_what_is_stored_belongs_to_nobody_else(hybrid: Any) -> None:
    """Hits copy: running on, beams and in-place damage do not reach the blocks."""
    prompt, prefixes = token_ids(1, 17), PrefixCache(block_size=8)
    expected = hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
    cache = K3Cache(hybrid.config, rollback_tokens=4)
    start, _ = prefixes.fill(cache, prompt)
    assert start == cache.get_seq_length() == 16 and cache.rollback_limit == 0
    with torch.no_grad():
        hybrid(prompt[:, 16:], cache=cache)
    cache.crop(-1)
    for layer, is_linear in zip(cache.layers, cache.is_linear, strict=True):
        for x in [layer.log.state, *layer.log.windows] if is_linear else [layer.keys, layer.values]:
            x.zero_()
    assert torch.equal(hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY), expected)


# -- budget -------------------------------------------------------------------------------------------------------


def test_the_budget_holds_and_the_oldest_leave(hybrid: Any) -> None:
    probe = PrefixCache(block_size=4)
    hybrid.generate(token_ids(1, 5), prefix_cache=probe, **GREEDY)
    each = probe.stats()["bytes"]
    prefixes = PrefixCache(block_size=4, max_bytes=int(4.5 * each))
    prompts = [token_ids(1, 9, seed=seed) for seed in range(4)]
    for prompt in prompts:
        hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
        assert prefixes.stats()["bytes"] <= 4.5 * each
    stats = prefixes.stats()
    assert (stats["stored"], stats["evicted"], stats["blocks"]) == (8, 4, 4)
    cache = K3Cache(hybrid.config)
    assert [prefixes.fill(K3Cache(hybrid.config), prompt)[0] for prompt in prompts] == [0, 0, 8, 8]
    # Used again, the third outlives the fourth.
    prefixes.fill(cache, prompts[2])
    hybrid.generate(token_ids(1, 9, seed=9), prefix_cache=prefixes, **GREEDY)
    assert [prefixes.fill(K3Cache(hybrid.config), prompts[i])[0] for i in (2, 3)] == [8, 0]


def test_a_beginning_outlives_what_follows_it(hybrid: Any) -> None:
    """A block whose beginning is gone could not be reached any more: chains lose their end first."""
    probe = PrefixCache(block_size=4)
    hybrid.generate(token_ids(1, 5), prefix_cache=probe, **GREEDY)
    prefixes = PrefixCache(block_size=4, max_bytes=int(3.5 * probe.stats()["bytes"]))
    for seed in range(6):
        hybrid.generate(token_ids(1, 7 + 2 * seed, seed=seed % 2), prefix_cache=prefixes, **GREEDY)
        assert all(b.parent == b"" or b.parent in prefixes._blocks for b in prefixes._blocks.values())
    tight = PrefixCache(block_size=4, max_bytes=8)
    hybrid.generate(token_ids(1, 9), prefix_cache=tight, **GREEDY)
    assert len(tight) == 0


@pytest.mark.parametrize("options", [{"block_size": 0}, {"max_bytes": 0}])
def test_sizes_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"block_size.*max_bytes.*above 0"):
        PrefixCache(**options)


def test_threads_share_one_cache(hybrid: Any) -> None:
    prefixes = PrefixCache(block_size=4, max_bytes=60_000)
    prompts = [joined(token_ids(1, 8, seed=i % 2), token_ids(1, 5, seed=10 + i)) for i in range(6)]
    expected = [hybrid.generate(prompt, **GREEDY) for prompt in prompts]
    failures: list[object] = []

    def work(offset: int) -> None:
        try:
            for i in range(6):
                at = (i + offset) % 6
                if not torch.equal(hybrid.generate(prompts[at], prefix_cache=prefixes, **GREEDY), expected[at]):
                    failures.append(at)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = prefixes.stats()
    assert not failures and stats["lookups"] == 24 and stats["hits"] > 0
    assert stats["bytes"] == sum(block.nbytes() for block in prefixes._blocks.values()) <= 60_000


# -- the right model ----------------------------------------------------------------------------------------------


def test_another_model_or_changed_weights_are_refused(hybrid: Any) -> None:
    prompt, prefixes = token_ids(1, 9), PrefixCache(block_size=4)
    hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
    other = build(tiny_config("KMK", eos_token_id=None), seed=1).requires_grad_(False)
    with pytest.raises(ValueError, match="another model"):
        other.generate(prompt, prefix_cache=prefixes, **GREEDY)
    twin = build(tiny_config("KMK", eos_token_id=None)).requires_grad_(False)
    twin.generate(prompt, prefix_cache=prefixes, **GREEDY)
    assert prefixes.stats()["hits"] == 1
    with torch.no_grad():
        hybrid.model.layers[2].block_sparse_moe.experts.down_proj[3, 5, 7] += 1e-3
    with pytest.raises(ValueError, match="weights have changed"):
        hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
    prefixes.clear()
    hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
    assert len(prefixes) == 2


def test_fingerprints_see_single_changes(hybrid: Any) -> None:
    first = fingerprint(hybrid)
    assert first == fingerprint(hybrid) == fingerprint(build(tiny_config("KMK", eos_token_id=None)))
    assert first != fingerprint(build(tiny_config("KMK", rms_norm_eps=1e-6)))
    weight = hybrid.model.embed_tokens.weight
    with torch.no_grad():
        weight[3], weight[4] = weight[4].clone(), weight[3].clone()
    swapped = fingerprint(hybrid)
    with torch.no_grad():
        weight[3], weight[4] = weight[4].clone(), weight[3].clone()
    assert swapped != first == fingerprint(hybrid)
    assert fingerprint(hybrid.bfloat16()) != first


# -- files --------------------------------------------------------------------------------------------------------


def test_saved_and_loaded(model: Any, tmp_path: Path) -> None:
    prompts = [joined(token_ids(1, 8), token_ids(1, 9, seed=seed)) for seed in (1, 2)]
    prefixes, path = PrefixCache(block_size=4), tmp_path / "prefix.safetensors"
    expected = [model.generate(prompt, prefix_cache=prefixes, **GREEDY) for prompt in prompts]
    prefixes.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["prefix.safetensors"]
    for options in ({}, {"device": "cpu"}):
        loaded = PrefixCache.load(path, model, **options)
        assert list(loaded._blocks) == list(prefixes._blocks) and loaded.block_size == 4
        assert loaded.stats()["bytes"] == prefixes.stats()["bytes"]
        outputs = [model.generate(prompt, prefix_cache=loaded, **GREEDY) for prompt in prompts]
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        assert loaded.stats()["hit_tokens"] == 32 and loaded.stats()["misses"] == 0
    each = prefixes.stats()["bytes"] / len(prefixes)
    small = PrefixCache.load(path, model, max_bytes=int(2.5 * each))
    assert len(small) == 2 and all(not b.parent or b.parent in small._blocks for b in small._blocks.values())


def test_files_of_another_model_and_other_files_are_refused(hybrid: Any, tmp_path: Path) -> None:
    prefixes, path = PrefixCache(block_size=4), tmp_path / "prefix.safetensors"
    with pytest.raises(ValueError, match="empty"):
        prefixes.save(path)
    hybrid.generate(token_ids(1, 9), prefix_cache=prefixes, **GREEDY)
    prefixes.save(path)
    with pytest.raises(ValueError, match="another model"):
        PrefixCache.load(path, build(tiny_config("KMK"), seed=1))
    tensors = load_file(path)
    save_file(tensors, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="not a prefix cache"):
        PrefixCache.load(tmp_path / "plain.safetensors", hybrid)
    about = {"fingerprint": prefixes.fingerprint, "block_size": 4, "parents": [0, 1]}
    save_file(tensors, tmp_path / "damaged.safetensors", metadata={"k3_prefix_cache": json.dumps(about)})
    with pytest.raises(ValueError, match="damaged"):
        PrefixCache.load(tmp_path / "damaged.safetensors", hybrid)


# -- signals ------------------------------------------------------------------------------------------------------


def test_signals_of_a_generation(hybrid: Any) -> None:
    signals, prefixes, prompt = K3Signals(), PrefixCache(block_size=4), token_ids(1, 9)
    expected = hybrid.generate(prompt, **GREEDY)
    for _ in range(2):
        output = hybrid.generate(prompt, prefix_cache=prefixes, signals=signals, prompt_lookup_num_tokens=2, **GREEDY)
        assert torch.equal(output, expected)
    report = signals.as_dict()
    assert report["prefix_cache"] == prefixes.stats() and report["prefix_cache"]["hit_tokens"] == 8
    assert report["rolled_back_tokens"] >= report["rollbacks"] >= 0
    assert report["cache_bytes"]["total"] > 0 and set(report["router"]) == {1, 2}
    assert all(sum(each["load"]) == 2 * report["tokens"] for each in report["router"].values())
    assert report["max_over_mean"] == max(each["max_over_mean"] for each in report["router"].values())
    assert json.loads(json.dumps(report))["calls"] == report["calls"] > 0
    signals.reset()
    assert signals.as_dict()["tokens"] == 0


def test_signals_count_choices_of_real_tokens(hybrid: Any) -> None:
    signals, ids, mask = K3Signals(), token_ids(2, 8), torch.ones(2, 8).long()
    mask[0, :5] = 0
    output = hybrid(ids, attention_mask=mask, signals=signals, output_router_logits=True)
    report, real = signals.as_dict(), mask.bool().flatten()
    assert report["tokens"] == 11 and report["calls"] == 1
    gates = [layer.block_sparse_moe.gate for layer in hybrid.model.layers[1:]]
    for gate, logits, found in zip(gates, output.router_logits, report["router"].values(), strict=True):
        chosen = gate._choose(logits.sigmoid() + gate.e_score_correction_bias)[real]
        load = torch.bincount(chosen.flatten(), minlength=8)
        p = load[load > 0] / load.sum()
        assert found["load"] == load.tolist() and found["max_over_mean"] == pytest.approx(8 * (load / 22).max().item())
        assert found["entropy"] == pytest.approx((-(p * p.log()).sum() / torch.tensor(8.0).log()).item(), rel=1e-5)


def test_nothing_stays_behind_when_signals_are_off(hybrid: Any) -> None:
    signals, ids = K3Signals(), token_ids(1, 4)
    hybrid(ids, signals=signals)
    with pytest.raises(ValueError):
        hybrid(ids + 1000, signals=signals)
    hybrid(ids)
    assert signals.as_dict()["calls"] == 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in hybrid.model.layers.modules())
    assert max_diff(hybrid(ids, signals=signals).logits, hybrid(ids).logits) < bound("unit_f64_max_abs")
