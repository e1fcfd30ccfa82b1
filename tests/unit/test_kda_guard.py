"""The guard: what trips it, that nothing wrong leaves it, and that it stays tripped."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modeling_k3 import kda_guard
from modeling_k3.kda_guard import KDAGuard, set_kda_guard
from modeling_k3.kda_ops import exact_kda
from modeling_k3.kda_paths import run_kda
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound
from tests.unit.helpers import kda_inputs

Result = tuple[Tensor, Tensor]


def breaks_on(call: int, spoil: Callable[[Tensor, Tensor], Result]) -> Callable[..., Result]:
    """A path that is right until call number `call`."""
    count = 0

    def path(implementation: str, *inputs: Tensor, lower_bound: float | None = None) -> Result:
        nonlocal count
        count += 1
        o, state = run_kda(implementation, *inputs, lower_bound=lower_bound)
        return spoil(o, state) if count >= call else (o, state)

    return path


def _nan(o: Tensor, state: Tensor) -> Result:
    o = o.clone()
    o[..., -1] = float("nan")
    return o, state


def _scaled_state(o: Tensor, state: Tensor) -> Result:
    return o, state * 1.05


def _raise(o: Tensor, state: Tensor) -> Result:
    raise RuntimeError("launch failed")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(kda_guard.logger, "warning", lines.append)
    return lines


@pytest.mark.parametrize(("spoil", "word"), [(_nan, "NaN"), (_scaled_state, "is off by"), (_raise, "launch failed")])
def test_the_fifth_call_is_recomputed_and_the_switch_is_sticky(
    spoil: Callable[..., Result], word: str, warnings: list[str]
) -> None:
    inputs = kda_inputs(1, 20, 2, 8, 6, dtype=torch.float32)
    guard, exact = KDAGuard(sample_every=1, run=breaks_on(5, spoil)), exact_kda(*inputs)
    for call in range(1, 8):
        found = guard("chunk", *inputs, lower_bound=-5.0)
        assert (guard.reason is None) == (call < 5)
        if call >= 5:
            assert all(torch.equal(x, y) for x, y in zip(found, exact, strict=True))
        assert max_diff(found[0], exact[0]) < bound("unit_kda_fp32_max_abs")
    assert word in str(guard.reason) and len(warnings) == 1 and "call 5" in warnings[0]
    assert (guard.calls, guard.recomputed) == (7, 1)
    guard.reset()
    assert guard.reason is None and guard.calls == 0


def test_samples_are_taken_as_often_as_asked() -> None:
    inputs = kda_inputs(1, 20, 2, 8, 6, dtype=torch.float32)
    guard = KDAGuard(sample_every=3)
    for _ in range(7):
        guard("auto", *inputs, lower_bound=-5.0)
    assert guard.samples == 3 and guard.reason is None and 0 < guard.worst < guard.bound
    never = KDAGuard(sample_every=0)
    never("auto", *inputs, lower_bound=-5.0)
    assert never.samples == 0


def test_inputs_without_a_number_are_not_the_paths_fault() -> None:
    inputs = kda_inputs(1, 20, 2, 8, 6, dtype=torch.float32)
    inputs[2][0, 3] = float("nan")
    guard = KDAGuard(sample_every=0)
    guard("chunk", *inputs, lower_bound=-5.0)
    assert guard.reason is None


def test_a_guarded_model_gives_what_the_exact_one_gives() -> None:
    model, ids = build(tiny_config()), token_ids(1, 24)
    with torch.no_grad():
        expected = model(input_ids=ids, kda_implementation="exact").logits
        guard = set_kda_guard(model, KDAGuard(sample_every=1, run=breaks_on(2, _nan)))
        assert max_diff(model(input_ids=ids).logits, expected) < bound("unit_model_fp32_max_abs")
        assert guard.reason is not None and guard.recomputed == 1
        set_kda_guard(model, None)
        assert model.model.layers[0].self_attn.kda_guard is None


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="sample_every=-1"):
        KDAGuard(sample_every=-1)
    with pytest.raises(ValueError, match="bound=0"):
        KDAGuard(bound=0)
    with pytest.raises(ValueError, match="no KDA layer"):
        set_kda_guard(torch.nn.Linear(2, 2), KDAGuard())
