"""The comparison accepts what is right and names what is wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modeling_k3.kda_check import GATES, LIMITS, check_path, compare, make_case
from modeling_k3.kda_ops import chunk_kda

Result = tuple[Tensor, Tensor]


@pytest.mark.parametrize("gate", GATES)
def test_the_chunk_form_passes_everywhere(gate: str) -> None:
    for length in (1, 70):
        finding = compare(chunk_kda, make_case(gate, length, torch.float32, width=16))
        assert not finding.failures, finding
        assert finding.errors.keys() == {"o", "state", "dq", "dk", "dv", "dlog_decay", "dbeta", "dstate"}


def test_cases_are_what_they_say() -> None:
    bound = make_case("at the bound", 40, torch.float32, width=8)
    assert bound.lower_bound == -5.0 and (bound.inputs[3] == -5).all()
    free = make_case("softplus", 40, torch.float32, width=8)
    assert free.lower_bound is None and free.inputs[3].min() < -5
    keys = make_case("parallel keys", 40, torch.float32, width=8).inputs[1][0, :, 0]
    assert (keys @ keys.T).min() > 0.8
    assert make_case("released", 9, torch.bfloat16).inputs[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"gate='x' is unknown"):
        make_case("x", 9, torch.float32)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 1.01


def _wrong_gradient(q: Tensor, k: Tensor, *rest: Tensor, lower_bound: float | None = None) -> Result:
    return chunk_kda(q, _WrongGradient.apply(k), *rest, lower_bound=lower_bound)


def _leaks(*inputs: Tensor, lower_bound: float | None = None) -> Result:
    o, state = chunk_kda(*inputs, lower_bound=lower_bound)
    return o + 1e-7 * o[:, -1:], state


def _nan(*inputs: Tensor, lower_bound: float | None = None) -> Result:
    o, state = chunk_kda(*inputs, lower_bound=lower_bound)
    return o * float("nan"), state


def _raises(*inputs: Tensor, lower_bound: float | None = None) -> Result:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (_wrong_gradient, "dk is off"),
        (_leaks, "change with what follows"),
        (_nan, "o is off by inf"),
        (_raises, "kernel"),
    ],
)
def test_what_is_wrong_is_named(path: Callable[..., Result], message: str) -> None:
    findings = list(check_path(path, [torch.float32], [40], gates=["mixed"], width=8))
    assert any(message in failure for finding in findings for failure in finding.failures)


def test_limits_tell_the_dtypes_apart() -> None:
    assert all(a < b for a, b in zip(LIMITS[torch.float32], LIMITS[torch.bfloat16], strict=True))
