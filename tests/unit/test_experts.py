"""Routed experts: the definition against loops, and the library's implementations against the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import K3Config
from modeling_k3.experts import K3Experts
from modeling_k3.mlp import K3MLP, gated_activation
from tests.models import max_diff, randomize, tiny_config
from tests.tolerances import bound
from tests.unit.helpers import tensor

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
TOKENS, EXPERTS, TOP_K = 11, 8, 3


def make(implementation: str = "eager", dtype: torch.dtype = torch.float64, **changes: Any) -> K3Experts:
    config = tiny_config(num_experts=EXPERTS, num_experts_per_token=TOP_K, **changes)
    config._experts_implementation = implementation
    experts = K3Experts(config)
    randomize(experts)
    return experts.to(dtype)


def routed(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, expert numbers and weights; experts 5 and later are never chosen."""
    chosen = torch.stack([tensor(5, seed=t).topk(TOP_K).indices for t in range(tokens)])
    weights = tensor(tokens, TOP_K, seed=1).abs()
    return tensor(tokens, 32, dtype=dtype), chosen, weights.to(torch.promote_types(dtype, torch.float32))


def truth(experts: K3Experts, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """s = sum_e p_e W2_e act(W1_e z, W3_e z), token by token, choice by choice; w1 stands above w3."""
    gate_up, down = experts.gate_up_proj.double(), experts.down_proj.double()
    width, out = down.shape[-1], torch.zeros(z.shape, dtype=torch.float64)
    for t in range(z.shape[0]):
        for expert, weight in zip(chosen[t].tolist(), weights[t].double(), strict=True):
            g, u = gate_up[expert, :width] @ z[t].double(), gate_up[expert, width:] @ z[t].double()
            if experts.hidden_act == "situ":
                inner = 4 * (g / 4).tanh() * g.sigmoid() * 25 * (u / 25).tanh()
            else:
                inner = g * g.sigmoid() * u
            out[t] += weight * (down[expert] @ inner)
    return out


@IMPLEMENTATIONS
@pytest.mark.parametrize("act", ["situ", "silu"])
def test_values(implementation: str, act: str) -> None:
    experts = make(implementation, torch.float32, hidden_act=act)
    z, chosen, weights = routed(torch.float32)
    expected = truth(experts, z, chosen, weights)
    y = experts(z, chosen, weights)
    assert y.dtype == torch.float32 and max_diff(y, expected) < bound("unit_experts_fp32_max_abs")


@IMPLEMENTATIONS
def test_float64_is_computed_in_float64(implementation: str) -> None:
    """The library's grouped kernels know no float64; the definition must take over."""
    experts = make(implementation)
    z, chosen, weights = routed()
    assert max_diff(experts(z, chosen, weights), truth(experts, z, chosen, weights)) < bound("unit_f64_max_abs")


def gradients(experts: K3Experts, z: Tensor, chosen: Tensor, weights: Tensor) -> list[Tensor]:
    leaves = [z.clone().requires_grad_(), weights.clone().requires_grad_()]
    y = experts(leaves[0], chosen, leaves[1])
    target = (y * tensor(*y.shape, seed=9, dtype=y.dtype)).sum()
    return list(torch.autograd.grad(target, [*leaves, experts.gate_up_proj, experts.down_proj]))


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_gradients_of_every_implementation(implementation: str, tokens: int) -> None:
    """One token and eight experts: most get no token at all."""
    inputs = routed(torch.float32, tokens)
    expected = gradients(make(), *(x.double() if x.is_floating_point() else x for x in inputs))
    found = gradients(make(implementation, torch.float32), *inputs)
    for name, a, b in zip(("z", "weights", "gate_up_proj", "down_proj"), found, expected, strict=True):
        assert max_diff(a, b) / b.abs().max().item() < bound("unit_experts_gradient_fp32_relative"), name


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_tokens_get_zero_gradients(implementation: str, dtype: torch.dtype) -> None:
    experts = make(implementation, dtype)
    z, chosen, weights = routed(dtype)
    experts(z, chosen, weights).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad.dtype == dtype and parameter.grad.isfinite().all()
        assert (parameter.grad[5:] == 0).all() and (parameter.grad[:5] != 0).flatten(1).any(1).all()


def test_finite_differences() -> None:
    experts = make(moe_intermediate_size=4, routed_expert_hidden_size=6)
    z, chosen, weights = routed(tokens=3)
    inputs = [z[:, :6].contiguous().requires_grad_(), weights.requires_grad_()]
    parameters = [p.detach().clone().requires_grad_() for p in experts.parameters()]

    def call(z: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        named = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(experts, named, (z, chosen, weights))

    assert torch.autograd.gradcheck(call, (*inputs, *parameters))


@IMPLEMENTATIONS
def test_half_precision_combines_experts_wide(implementation: str) -> None:
    """The weighted sum is float32 and cast once: opposite experts must cancel before anything is rounded."""
    experts = make(implementation, torch.bfloat16)
    with torch.no_grad():
        experts.gate_up_proj[1:] = experts.gate_up_proj[0]
        experts.down_proj[1:] = experts.down_proj[0]
    z = tensor(TOKENS, 32, dtype=torch.bfloat16)
    chosen = torch.tensor([[0, 1, 2]]).expand(TOKENS, -1).contiguous()
    weights = torch.tensor([[1.0, -1.0 + 2**-12, 0.0]]).expand(TOKENS, -1).contiguous()
    y, alone = experts(z, chosen, weights), experts(z, chosen, torch.tensor([[1.0, 0.0, 0.0]]).expand(TOKENS, -1))
    assert y.dtype == torch.bfloat16
    # Rounding before the sum would leave a multiple of the last bit of y, 2^-8, or nothing.
    assert ((y.double() - alone.double() * 2**-12).abs() <= alone.double().abs() * 2**-18).all()


@IMPLEMENTATIONS
def test_the_order_of_choices_does_not_matter(implementation: str) -> None:
    experts = make(implementation, torch.float32)
    z, chosen, weights = routed(torch.float32)
    y, flipped = experts(z, chosen, weights), experts(z, chosen.flip(1), weights.flip(1))
    assert max_diff(y, flipped) < bound("unit_fp32_max_abs") * y.abs().max().item()


def test_deterministic_algorithms_are_enough() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        experts = make(dtype=torch.float32)
        z, chosen, weights = routed(torch.float32, tokens=1)
        experts(z, chosen, weights).sum().backward()
        assert all(p.grad.isfinite().all() for p in experts.parameters())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("act", ["situ", "silu"])
@pytest.mark.parametrize("width", [None, 32])
def test_one_expert_is_the_same_function_as_the_dense_mlp(act: str, width: int | None) -> None:
    """Same activation and bounds in dense, shared and routed paths; without a latent an expert has full width."""
    config = tiny_config(hidden_act=act, num_experts=1, num_experts_per_token=1, routed_expert_hidden_size=width)
    experts = K3Experts(config).double()
    randomize(experts)
    size = width or config.hidden_size
    assert tuple(experts.gate_up_proj.shape) == (1, 2 * 64, size) and tuple(experts.down_proj.shape) == (1, size, 64)
    mlp = K3MLP(K3Config(hidden_size=size, hidden_act=act), 64).double()
    with torch.no_grad():
        mlp.gate_proj.weight.copy_(experts.gate_up_proj[0, :64])
        mlp.up_proj.weight.copy_(experts.gate_up_proj[0, 64:])
        mlp.down_proj.weight.copy_(experts.down_proj[0])
    z = tensor(5, size, scale=20)
    y = experts(z, torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1, dtype=torch.float64))
    assert max_diff(y, mlp(z)) < bound("f64_paths_max_abs")


def test_the_activation_hook_of_the_library_is_ours() -> None:
    experts = make()
    gate_up = tensor(3, 128, scale=100)
    expected = gated_activation(*gate_up.chunk(2, -1), kind="situ", beta=4.0, linear_beta=25.0)
    assert torch.equal(experts._apply_gate(gate_up), expected)


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(KeyError, match="no_such_kernel"):
        make("no_such_kernel", torch.float32)(*routed(torch.float32))
