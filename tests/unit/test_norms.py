"""RMSNorm and the gated RMSNorm, against the equations written out for single numbers."""

import math

import pytest
import torch
from torch import Tensor

from modeling_k3.norms import K3RMSNorm, K3RMSNormGated, gated_norm, rms_normalize
from tests.models import max_diff
from tests.tolerances import bound
from tests.unit.helpers import tensor


def normalized(row: list[float], eps: float) -> list[float]:
    """x / sqrt(mean(x^2) + eps), number by number."""
    root = math.sqrt(sum(x * x for x in row) / len(row) + eps)
    return [x / root for x in row]


def truth(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None) -> Tensor:
    rows = [normalized(row, eps) for row in x.double().flatten(0, -2).tolist()]
    y = torch.tensor(rows, dtype=torch.float64).view_as(x) * weight.double()
    return y if gate is None else y / (1 + (-gate.double()).exp())


# At magnitude 1e-3 an epsilon of 1e-5 outweighs the mean square; outside the root it would be lost.
@pytest.mark.parametrize("scale", [1e-4, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.1])
def test_norm_follows_the_equation(scale: float, eps: float) -> None:
    norm = K3RMSNorm(7, eps).double()
    norm.weight.data = tensor(7, seed=1)
    x = tensor(2, 3, 7, scale=scale)
    assert max_diff(norm(x), truth(x, norm.weight, eps)) < bound("unit_f64_max_abs")
    assert max_diff(norm.float()(x.float()), truth(x.float(), norm.weight, eps)) < bound("unit_fp32_max_abs")


def test_the_weight_is_used_as_it_is() -> None:
    norm = K3RMSNorm(5, 1e-5)
    assert (norm.weight == 1).all()
    norm.weight.data.zero_()
    assert (norm(tensor(2, 5, dtype=torch.float32)) == 0).all()


def test_zero_stays_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(2, 5, requires_grad=True)
    y = rms_normalize(x, 1e-5)
    y.sum().backward()
    assert (y == 0).all() and x.grad.isfinite().all()


def test_statistics_are_not_taken_in_half_precision() -> None:
    """300 squared overflows fp16: an fp16 mean would be infinite and the result zero."""
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    y = K3RMSNorm(8, 1e-5).half()(x)
    assert y.dtype == torch.float16 and (y == 1).all()


def test_bf16_rounds_before_the_weight() -> None:
    """The normalised value is rounded, then multiplied; the other order gives other bits for this data."""
    norm = K3RMSNorm(64, 1e-5).bfloat16()
    norm.weight.data = tensor(64, seed=3, dtype=torch.bfloat16)
    x = tensor(16, 64, dtype=torch.bfloat16)
    plain = truth(x, torch.ones(64), 1e-5)
    rounded_first = plain.bfloat16() * norm.weight
    assert torch.equal(norm(x), rounded_first)
    assert not torch.equal(rounded_first, (plain * norm.weight.double()).bfloat16())


@pytest.mark.parametrize("gated", [False, True])
def test_float64_stays_float64_and_differentiable(gated: bool) -> None:
    x, gate, weight = (tensor(3, 6, seed=i).requires_grad_() for i in range(3))
    if gated:
        norm = K3RMSNormGated(6, 1e-5).double()
        inputs = (x, gate, weight[0].detach().requires_grad_())
    else:
        norm = K3RMSNorm(6, 1e-5).double()
        inputs = (x, weight[0].detach().requires_grad_())

    def call(*given: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": given[-1]}, given[:-1])

    assert call(*inputs).dtype == torch.float64
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_gated_norm_follows_the_equation_per_head(eps: float) -> None:
    norm = K3RMSNormGated(6, eps).double()
    norm.weight.data = tensor(6, seed=1)
    x, gate = tensor(2, 3, 4, 6, scale=1e-2), tensor(2, 3, 4, 6, seed=2, scale=3.0)
    assert max_diff(norm(x, gate), truth(x, norm.weight, eps, gate)) < bound("unit_f64_max_abs")
    one_head = norm(x[:, :, 2], gate[:, :, 2])
    assert max_diff(norm(x, gate)[:, :, 2], one_head) < bound("unit_f64_max_abs")


def test_gate_closes_and_opens_completely() -> None:
    norm = K3RMSNormGated(6, 1e-5)
    x = tensor(3, 6, dtype=torch.float32)
    assert norm(x, torch.full_like(x, -100.0)).abs().max() < 1e-40
    assert torch.equal(norm(x, torch.full_like(x, 100.0)), rms_normalize(x, 1e-5))


def test_gated_norm_casts_once_at_the_end() -> None:
    """Its input is the float32 recurrence, its output the activation dtype of the gate."""
    norm = K3RMSNormGated(64, 1e-5).bfloat16()
    norm.weight.data = 1 + tensor(64, seed=3, dtype=torch.float32, scale=2**-12)
    x, gate = tensor(16, 64, dtype=torch.float32), tensor(16, 64, seed=1, dtype=torch.bfloat16)
    y = norm(x, gate)
    assert norm.weight.dtype == torch.float32 and y.dtype == torch.bfloat16
    expected = truth(x, norm.weight, 1e-5, gate)
    assert torch.equal(y, expected.bfloat16())
    assert not torch.equal(y, truth(x, norm.weight.bfloat16(), 1e-5, gate).bfloat16())


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norms_own_backward_follows_the_equation(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """More rows than a block holds; a weight wider than the activations makes the result as wide."""
    norm = K3RMSNorm(2048, eps=1e-5).to(weight_dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + tensor(2048, scale=0.2))
        x = (tensor(2, 33, 2048, seed=1) * 3).to(dtype)
        plain = norm(x)
    x.requires_grad_()
    y = norm(x)
    dy = tensor(*y.shape, seed=2).to(y.dtype)
    assert torch.equal(y, plain) and y.dtype == torch.promote_types(dtype, weight_dtype)
    dx, dw = torch.autograd.grad(y, (x, norm.weight), dy)
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    true = weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    for mine, expected, own in zip(
        (dx, dw), torch.autograd.grad(true, (wide, weight), dy.double()), (x, norm.weight), strict=True
    ):
        assert mine.dtype == own.dtype
        coarsest = max(torch.finfo(each).eps for each in (dtype, weight_dtype))
        assert (mine.double() - expected).norm() <= 2 * coarsest * expected.norm()


def test_the_norm_keeps_its_input_and_nothing_wide() -> None:
    norm, kept = K3RMSNorm(64, eps=1e-5).bfloat16(), []
    x = tensor(50, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (kept.append(saved.nbytes), saved)[1], lambda x: x):
        norm(x)
    assert sum(kept) == x.nbytes + norm.weight.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gated_norms_own_backward_follows_the_equation(dtype: torch.dtype) -> None:
    """More rows than a block holds; the recurrence answers in float32, the gate has the activation dtype."""
    wide_dtype = torch.promote_types(dtype, torch.float32)
    weight = (1 + tensor(2048, scale=0.2)).to(wide_dtype).requires_grad_()
    x, gate = (tensor(2, 33, 1, 2048, seed=seed).mul(3) for seed in (1, 2))
    x, gate = x.to(wide_dtype).requires_grad_(), gate.to(dtype).requires_grad_()
    y = gated_norm(x, gate, weight)
    with torch.no_grad():
        assert torch.equal(y, gated_norm(x, gate, weight))
    dy = tensor(*y.shape, seed=3).to(dtype)
    leaves = [each.detach().double().requires_grad_() for each in (x, gate, weight)]
    true = leaves[2] * leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + 1e-5) * leaves[1].sigmoid()
    expected = torch.autograd.grad(true, leaves, dy.double())
    for mine, exact, own in zip(
        torch.autograd.grad(y, (x, gate, weight), dy), expected, (x, gate, weight), strict=True
    ):
        assert mine.dtype == own.dtype
        assert (mine.double() - exact).norm() <= 2 * torch.finfo(own.dtype).eps * exact.norm()
