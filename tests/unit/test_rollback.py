"""Taking tokens back: the log of one layer, windows in tokens and bytes, refusals, and calls that break half-way."""

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import K3Cache
from modeling_k3.cache import logged_bytes_per_token
from modeling_k3.rollback import KDAInputs, RollbackLog, join_inputs
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound
from tests.unit.helpers import tensor
from tests.unit.test_cache import LAYOUTS, OPERATIONS, run, same, tensors


@pytest.fixture(scope="module")
def model() -> Any:
    return build(tiny_config("KMK"))


def inputs(tokens: int, seed: int = 0, real: Tensor | None = None) -> KDAInputs:
    parts = [tensor(2, tokens, width, seed=seed + i) for i, width in enumerate((6, 6, 6, 3, 2))]
    return KDAInputs(*parts, real)


def counting(calls: list[int]) -> Any:
    """A layer whose state is the sum of what it has read, and whose output is the running sum."""

    def advance(x: KDAInputs, windows: Any, state: Tensor | None) -> tuple[Tensor, list[Tensor], Tensor]:
        calls.append(x.num_tokens)
        o = x.q.cumsum(dim=1) + (0 if state is None else state.unsqueeze(1))
        return o, [x.q[:, -1:]] * 3, o[:, -1]

    return advance


@pytest.mark.parametrize("pieces", [[1] * 30, [5, 1, 9, 15], [30], [2, 28]])
def test_a_log_keeps_between_one_and_two_windows(pieces: list[int]) -> None:
    log, state, total = RollbackLog(4, None, None), None, 0
    whole = inputs(30)
    for piece in pieces:
        o, _, state = log.run(whole.span(total, total + piece), None, state, counting([]))
        total += piece
        assert max_diff(o, whole.q.cumsum(dim=1)[:, total - piece : total]) < bound("unit_f64_max_abs")
        assert min(4, total) <= log.num_tokens <= 8


def test_replay_costs_only_what_is_logged() -> None:
    log, calls = RollbackLog(4, None, None), []
    advance, whole = counting(calls), inputs(20)
    _, _, state = log.run(whole.span(0, 16), None, None, advance)
    log.crop(3)
    calls.clear()
    o, _, _ = log.run(whole.span(13, 15), None, state, advance)
    assert calls == [3] and max_diff(o, whole.q.cumsum(dim=1)[:, 13:15]) < bound("unit_f64_max_abs")


def test_joined_masks_fill_what_was_unpadded() -> None:
    real = torch.tensor([[True, False], [True, True]])
    joined = join_inputs([inputs(3), inputs(2, seed=9, real=real)])
    assert joined.num_tokens == 5 and joined.mask.tolist() == [[True] * 4 + [False], [True] * 5]
    assert join_inputs([inputs(3), inputs(2)]).mask is None


@pytest.mark.parametrize("layers", ["KMK", "KKK", "MM"])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_tokens_within_the_window_can_be_taken_back(layers: str, window: int) -> None:
    model = build(tiny_config(layers, num_experts=None), dtype=torch.float64)
    ids = token_ids(2, 30)
    whole = run(model, ids, K3Cache(model.config))
    for count in {1, window}:
        for pieces in ([20], [12, 1, 1, 1, 1, 1, 1, 1, 1], [10, 7, 3], [3] + [1] * 17):
            cache = K3Cache(model.config, rollback_tokens=window)
            for piece in ids[:, :20].split(pieces, dim=1):
                run(model, piece, cache)
            assert cache.rollback_limit >= window
            cache.crop(-count)
            assert cache.get_seq_length() == 20 - count
            out = run(model, ids[:, 20 - count : 26], cache)
            assert max_diff(out, whole[:, 20 - count : 26]) < bound("f64_paths_max_abs")
            # The window goes on from here.
            cache.crop(-min(window, 6))
            again = run(model, ids[:, 26 - min(window, 6) :], cache)
            assert max_diff(again, whole[:, 26 - min(window, 6) :]) < bound("f64_paths_max_abs")


def test_outside_the_window_nothing_changes(model: Any) -> None:
    cache = K3Cache(model.config, rollback_tokens=3)
    for piece in token_ids(1, 20).split([9] + [1] * 11, dim=1):
        run(model, piece, cache)
    before, limit = tensors(cache), cache.rollback_limit
    assert 3 <= limit <= 6
    for amount in (-limit - 1, -100, 1):
        with pytest.raises(ValueError, match=rf"crop\({amount}\).*allowed are {-limit} to 0"):
            cache.crop(amount)
    assert same(tensors(cache), before) and cache.get_seq_length() == 20 and cache.rollback_limit == limit


def test_everything_can_be_taken_back_from_the_beginning(model: Any) -> None:
    cache, ids = K3Cache(model.config, rollback_tokens=16), token_ids(2, 6)
    run(model, ids, cache)
    cache.crop(-6)
    assert cache.get_seq_length() == 0
    fresh = run(model, ids, K3Cache(model.config))
    assert max_diff(run(model, ids, cache), fresh) < bound("unit_model_fp32_max_abs")


def test_a_state_that_was_taken_back_is_not_handed_out(model: Any) -> None:
    cache = K3Cache(model.config, rollback_tokens=4)
    run(model, token_ids(1, 6), cache)
    assert cache.get_recurrent_state(0) is not None
    cache.crop(-2)
    with pytest.raises(ValueError, match="taken back"):
        cache.get_recurrent_state(0)
    run(model, token_ids(1, 1), cache)
    assert cache.get_recurrent_state(0) is not None and cache.counters == {"rollbacks": 1, "rolled_back_tokens": 2}


def test_windows_in_bytes() -> None:
    config = tiny_config("KMK")
    each = logged_bytes_per_token(config)
    assert each == 2 * 4 * (3 * 48 + 16 + 3)
    cache, model = K3Cache(config, rollback_bytes=10 * each), build(config)
    for piece in token_ids(1, 40).split([20] + [1] * 20, dim=1):
        run(model, piece, cache)
        states = sum(x.nbytes for i in (0, 2) for x in (*cache.layers[i].windows, cache.layers[i].state))
        assert cache.nbytes()["rollback"] <= 10 * each + states
    assert cache.rollback_limit >= 5
    for options in ({"rollback_bytes": each}, {"rollback_tokens": 0}, {"rollback_tokens": 2, "rollback_bytes": 10**6}):
        with pytest.raises(ValueError, match="rollback"):
            K3Cache(config, **options)


@LAYOUTS
def test_a_log_moves_with_the_rows(layers: str) -> None:
    """Beams and drafts together: what the log holds follows every batch operation."""
    model = build(tiny_config(layers, num_experts=None), dtype=torch.float64)
    ids, more = token_ids(3, 12), token_ids(3, 4, seed=4)
    for operation, rows in OPERATIONS.values():
        cache = K3Cache(model.config, rollback_tokens=4)
        run(model, ids, cache)
        cache.crop(-1)
        operation(cache)
        cache = pickle.loads(pickle.dumps(deepcopy(cache)))
        cache.crop(-2)
        whole = run(model, torch.cat([ids[rows, :9], more[[r % 3 for r in rows]]], 1), K3Cache(model.config))
        assert max_diff(run(model, more[[r % 3 for r in rows]], cache), whole[:, 9:]) < bound("f64_paths_max_abs")


def test_a_call_that_breaks_half_way_has_not_happened(model: Any) -> None:
    cache, ids = K3Cache(model.config, rollback_tokens=4), token_ids(1, 12)
    run(model, ids[:, :6], cache)
    before = tensors(cache)

    def fail(*_: Any) -> None:
        raise MemoryError("as if")

    handle = model.model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        run(model, ids[:, 6:9], cache)
    handle.remove()
    assert same(tensors(cache), before) and {layer.get_seq_length() for layer in cache.layers} == {6}
    whole = run(model, ids, K3Cache(model.config))
    assert max_diff(run(model, ids[:, 6:], cache), whole[:, 6:]) < bound("unit_model_fp32_max_abs")


def test_another_prompt_is_not_continued_by_mistake() -> None:
    """A cache knows its tokens: `generate` with a sequence that begins otherwise is refused, not silently wrong."""
    model = build(tiny_config("KM", eos_token_id=None)).requires_grad_(False)
    prompt, greedy = token_ids(2, 9), {"max_new_tokens": 3, "do_sample": False}
    cache = K3Cache(model.config, rollback_tokens=8)
    first = model.generate(prompt, cache=cache, **greedy)
    changed = first.clone()
    changed[1, 4] = (changed[1, 4] + 1) % 100
    for wrong in (changed, first.flip(0)):
        with pytest.raises(ValueError, match="not the first ones of the input"):
            model.generate(wrong, cache=cache, **greedy)
    assert cache.get_seq_length() == 11
    cache.crop(-7)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(
        model.generate(changed.flip(0), cache=cache, **greedy), model.generate(changed.flip(0), **greedy)
    )


def test_rows_are_counted_while_tokens_are_taken_back(model: Any) -> None:
    """Also where everything logged was taken back: the base still knows how many rows there are."""
    for prompt, count in ((0, 5), (40, 3), (40, None)):
        cache = K3Cache(model.config, rollback_tokens=5)
        if prompt:
            run(model, token_ids(2, prompt), cache)
        run(model, token_ids(2, 5), cache)
        cache.crop(-(count or cache.rollback_limit))
        assert cache.held_batch_size == (2 if cache.get_seq_length() else None)
        if cache.get_seq_length():
            with pytest.raises(ValueError, match="batch of 2"):
                run(model, token_ids(3, 1), cache)
