"""Gradients of KDA: finite differences, chunks against the recurrence, nothing from the future."""

import pytest
import torch
from torch import Tensor

from modeling_k3 import kda_chunk
from modeling_k3.kda_ops import chunk_kda, decay_gate, l2_normalize, recurrent_kda
from tests.models import max_diff
from tests.tolerances import bound
from tests.unit.helpers import kda_inputs, tensor

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130, 300)
NAMES = ("q", "k", "v", "log_decay", "beta", "state")
GATES = pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])


def gradients(path: str, inputs: list[Tensor], lower_bound: float | None = None) -> list[Tensor]:
    """Gradients of a random direction of outputs and final state."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, state = recurrent_kda(*leaves) if path == "recurrent" else chunk_kda(*leaves, lower_bound=lower_bound)
    target = (o * tensor(*o.shape, seed=70, dtype=o.dtype)).sum()
    target = target + (state * tensor(*state.shape, seed=71, dtype=o.dtype)).sum()
    return list(torch.autograd.grad(target, leaves))


def compare(inputs: list[Tensor], lower_bound: float | None) -> None:
    expected = gradients("recurrent", inputs)
    double = gradients("chunk", inputs, lower_bound)
    single = gradients("chunk", [x.float() for x in inputs], lower_bound)
    for name, truth, fast, rough in zip(NAMES, expected, double, single, strict=False):
        assert max_diff(fast, truth) < bound("f64_paths_max_abs"), name
        relative = max_diff(rough, truth) / truth.abs().max().clamp(min=1e-3).item()
        assert relative < bound("unit_kda_gradient_fp32_relative"), name


@GATES
@pytest.mark.parametrize("length", LENGTHS)
def test_chunk_gradients_equal_those_of_the_recurrence(length: int, lower_bound: float | None) -> None:
    compare(kda_inputs(2, length, 2, 8, 6, bounded=lower_bound is not None), lower_bound)


@GATES
@pytest.mark.parametrize("slab", [1, 2**9, 2**11])
def test_gradients_across_slabs(slab: int, lower_bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda_chunk, "_SLAB", slab)
    compare(kda_inputs(3, 50, 3, 8, 6, bounded=lower_bound is not None), lower_bound)


def test_gradients_without_a_state() -> None:
    compare(kda_inputs(2, 40, 2, 8, 6, state=False), -5.0)


@pytest.mark.parametrize(
    ("lower_bound", "value"), [(-5.0, -5.0), (-5.0, 0.0), (None, -60.0), (None, 0.0)], ids=lambda x: str(x)
)
def test_gradients_at_the_limits_of_the_decay(lower_bound: float | None, value: float) -> None:
    inputs = kda_inputs(1, 70, 2, 8, 6)
    inputs[3].fill_(value)
    compare(inputs, lower_bound)


@GATES
def test_gradients_with_nearly_parallel_keys(lower_bound: float | None) -> None:
    inputs = kda_inputs(1, 70, 2, 8, 6)
    k = tensor(1, 1, 2, 8, seed=9) + tensor(1, 70, 2, 8, seed=8, scale=0.05)
    inputs[1], inputs[4] = (k / k.norm(dim=-1, keepdim=True)).float().double(), torch.full_like(inputs[4], 0.96875)
    inputs[3] = (inputs[3] * 1e-2).float().double()
    compare(inputs, lower_bound)


@GATES
@pytest.mark.parametrize("path", ["recurrent", "chunk"])
def test_finite_differences(path: str, lower_bound: float | None) -> None:
    leaves = [x.requires_grad_() for x in kda_inputs(1, 5, 1, 3, 2, bounded=lower_bound is not None)]

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        return recurrent_kda(*given) if path == "recurrent" else chunk_kda(*given, lower_bound=lower_bound)

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_finite_differences_of_gate_and_normalisation(lower_bound: float | None) -> None:
    z, a_log, bias = tensor(2, 6).requires_grad_(), tensor(2, seed=1).requires_grad_(), tensor(6, seed=2)
    inputs = (z, a_log, bias.requires_grad_())
    assert torch.autograd.gradcheck(lambda *given: decay_gate(*given, lower_bound=lower_bound), inputs)
    assert torch.autograd.gradcheck(l2_normalize, tensor(3, 4).requires_grad_())


@GATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [0, 3, 15, 16, 63, 64])
def test_an_output_sends_exactly_nothing_to_later_tokens(t: int, dtype: torch.dtype, lower_bound: float | None) -> None:
    leaves = [x.requires_grad_() for x in kda_inputs(1, 80, 2, 16, 12, bounded=lower_bound is not None, dtype=dtype)]
    o, _ = chunk_kda(*leaves, lower_bound=lower_bound)
    grads = torch.autograd.grad((o[:, t] * tensor(1, 2, 12, dtype=dtype)).sum(), leaves)
    for name, grad in zip(NAMES[:5], grads, strict=False):
        assert (grad[:, t + 1 :] == 0).all(), name
        assert grad[:, t].abs().max() > 0, name


@GATES
def test_only_what_is_asked_for_is_differentiated(lower_bound: float | None) -> None:
    """Frozen inputs, an unused output, an unused state: the remaining gradients do not change."""
    inputs = kda_inputs(1, 20, 1, 4, 3, bounded=lower_bound is not None)
    for index, name in enumerate(NAMES):
        for use in ("o", "state"):
            results = []
            for path in ("recurrent", "chunk"):
                leaf = inputs[index].clone().requires_grad_()
                given = [*inputs[:index], leaf, *inputs[index + 1 :]]
                o, state = recurrent_kda(*given) if path == "recurrent" else chunk_kda(*given, lower_bound=lower_bound)
                target = o if use == "o" else state
                if not (name == "q" and use == "state"):
                    results.append(torch.autograd.grad(target.pow(2).sum(), leaf)[0])
            if results:
                assert max_diff(*results) < bound("f64_paths_max_abs"), (name, use)


def test_second_derivatives_are_right_or_refused() -> None:
    """A hand-written backward that silently dropped second derivatives would spoil gradient penalties."""

    def second(fast: bool) -> Tensor:
        leaves = [x.requires_grad_() for x in kda_inputs(1, 4, 1, 2, 2)]
        o, _ = chunk_kda(*leaves, lower_bound=-5.0) if fast else recurrent_kda(*leaves)
        (first,) = torch.autograd.grad(o.pow(3).sum(), leaves[1], create_graph=True)
        first.pow(2).sum().backward()
        return leaves[2].grad

    expected = second(fast=False)
    try:
        found = second(fast=True)
    except RuntimeError as refusal:
        assert "differentia" in str(refusal)
    else:
        assert max_diff(found, expected) < bound("f64_paths_max_abs")
