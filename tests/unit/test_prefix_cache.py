"""PrefixCache: what is reused equals what is computed; budget, counters, threads."""

import pickle
import threading
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import K3Cache, PrefixCache
from tests.models import build, tiny_config, token_ids

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


def test_a_call_that_began_before_clear_stores_and_reads_nothing(hybrid: Any) -> None:
    """Thread 1 is in the middle of its prefill when another one clears the cache and binds another model."""
    other = build(tiny_config("KMK", eos_token_id=None), seed=1).requires_grad_(False)
    ids, prefixes, cache = token_ids(1, 9), PrefixCache(block_size=4), K3Cache(hybrid.config)
    binding = prefixes.bind(hybrid)
    _, prompt = prefixes.fill(cache, ids, binding=binding)
    hybrid(ids[:, :4], cache=cache)
    prefixes.clear()
    prefixes.bind(other)
    prefixes.store(cache, ids, prompt, 4)
    assert len(prefixes) == 0
    expected = other.generate(ids, prefix_cache=prefixes, **GREEDY)
    assert torch.equal(expected, other.generate(ids, **GREEDY)) and len(prefixes) == 2
    assert prefixes.fill(K3Cache(hybrid.config), ids, binding=binding)[0] == 0


def test_two_models_take_turns_on_one_cache(hybrid: Any) -> None:
    """Whoever is refused clears the cache and goes on; no output is ever the other model's."""
    models = [hybrid, build(tiny_config("KMK", eos_token_id=None), seed=1).requires_grad_(False)]
    prompts, prefixes, failures = [token_ids(1, 9, seed=i) for i in range(2)], PrefixCache(block_size=4), []
    expected = [[model.generate(prompt, **GREEDY) for prompt in prompts] for model in models]

    def work(which: int) -> None:
        try:
            for i in range(8):
                try:
                    found = models[which].generate(prompts[i % 2], prefix_cache=prefixes, **GREEDY)
                except ValueError as error:
                    assert "another model" in str(error)
                    prefixes.clear()
                    continue
                if not torch.equal(found, expected[which][i % 2]):
                    failures.append(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    prefixes.clear()
    prefixes.bind(hybrid)


def test_copies_and_pickles(hybrid: Any) -> None:
    prefixes, prompt = PrefixCache(block_size=4), token_ids(1, 9)
    hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
    twin = deepcopy(prefixes)
    hybrid.generate(prompt, prefix_cache=twin, **GREEDY)
    assert (twin.stats()["hits"], prefixes.stats()["hits"]) == (1, 0) and len(twin) == 2
    twin.clear()
    assert len(prefixes) == 2
    with pytest.raises(TypeError, match="save"):
        pickle.dumps(prefixes)


@pytest.mark.parametrize("option", ["output_hidden_states", "output_router_logits", "output_attentions"])
def test_outputs_of_every_token_go_past_it(option: str, hybrid: Any) -> None:
    """A reused prefix has no hidden states: they would come back cut."""
    hybrid.set_attn_implementation("eager")
    prefixes, prompt = PrefixCache(block_size=4), token_ids(1, 9)
    options: dict[str, Any] = {option: True, "return_dict_in_generate": True, **GREEDY}
    expected = hybrid.generate(prompt, **options)
    for _ in range(2):
        found = hybrid.generate(prompt, prefix_cache=prefixes, **options)
        assert torch.equal(found.sequences, expected.sequences)
        if option == "output_hidden_states":
            assert [x.shape for x in found.hidden_states[0]] == [x.shape for x in expected.hidden_states[0]]
    assert prefixes.stats()["bypassed"] == 2 and len(prefixes) == 0
    with pytest.raises(TypeError, match="prefix_cache is a dict; allowed"):
        hybrid.generate(prompt, prefix_cache={}, **GREEDY)


def test_states_come_back_to_the_device_of_their_layer(hybrid: Any) -> None:
    """Layers on different devices: a hook says where each computes, and the meta device stands for another one."""
    prefixes, prompt, cache = PrefixCache(block_size=4), token_ids(1, 9), K3Cache(hybrid.config)
    hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
    hybrid.model.layers[1]._hf_hook = SimpleNamespace(execution_device="meta")
    binding = prefixes.bind(hybrid)
    prefixes.fill(cache, prompt, binding=binding)
    assert [layer.any_tensor().device.type for layer in cache.layers] == ["cpu", "meta", "cpu"]
