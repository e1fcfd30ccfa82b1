"""K3Signals: what is counted is what happened, also in threads; nothing stays behind."""

import json
import threading
from copy import deepcopy
from typing import Any

import pytest
import torch

from modeling_k3 import K3Cache, K3Signals, PrefixCache
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def hybrid() -> Any:
    return build(tiny_config("KMK", eos_token_id=None)).requires_grad_(False)


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


def test_one_generation_reports_its_prefix_cache(hybrid: Any) -> None:
    """An empty PrefixCache is one all the same."""
    signals, prefixes = K3Signals(), PrefixCache(block_size=4)
    hybrid.generate(token_ids(1, 9), prefix_cache=prefixes, signals=signals, **GREEDY)
    report = signals.as_dict()
    assert report["prefix_cache"] == prefixes.stats() and report["prefix_cache"]["stored"] == 2
    assert report["tokens"] == 9 + 5 and bool(PrefixCache())


def test_threads_share_signals(hybrid: Any) -> None:
    """Each thread's calls count once, with its own padding."""
    signals, alone, ids = K3Signals(), K3Signals(), token_ids(2, 8)
    masks = [torch.ones(2, 8).long().index_fill(1, torch.arange(i), 0) for i in range(4)]
    for mask in masks:
        hybrid(ids, attention_mask=mask, signals=alone)

    def work(mask: torch.Tensor) -> None:
        for _ in range(6):
            hybrid(ids, attention_mask=mask, signals=signals)

    threads = [threading.Thread(target=work, args=(mask,)) for mask in masks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, expected = signals.as_dict(), alone.as_dict()
    assert (found["calls"], found["tokens"]) == (6 * expected["calls"], 6 * expected["tokens"])
    for layer, each in expected["router"].items():
        assert found["router"][layer]["load"] == [6 * n for n in each["load"]]


def test_rollbacks_before_and_in_copies_do_not_count(hybrid: Any) -> None:
    signals, cache, ids = K3Signals(), K3Cache(hybrid.config, rollback_tokens=8), token_ids(1, 8)
    hybrid(ids, cache=cache)
    cache.crop(-2)
    hybrid(ids[:, :1], cache=cache, signals=signals)
    assert signals.as_dict()["rollbacks"] == 0
    cache.crop(-1)
    twin = deepcopy(cache)
    hybrid(ids[:, :1], cache=twin, signals=signals)
    twin.crop(-1)
    assert (signals.as_dict()["rollbacks"], signals.as_dict()["rolled_back_tokens"]) == (2, 2)


def test_something_else_is_refused(hybrid: Any) -> None:
    with pytest.raises(TypeError, match="signals is a dict; allowed"):
        hybrid(token_ids(1, 4), signals={})
    with pytest.raises(TypeError, match="signals is a dict; allowed"):
        hybrid.generate(token_ids(1, 4), signals={}, **GREEDY)
