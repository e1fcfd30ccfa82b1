"""LoRA on experts: values, gradients and what is decoded, against experts that are plain linear layers."""

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from modeling_k3.adapters import K3ExpertsLora
from modeling_k3.adapters.expert_product import _gather, adapted_experts
from modeling_k3.experts import K3Experts
from modeling_k3.mxfp4 import encode
from tests.loras import UnstackedExperts, codes_of, counting_decodes
from tests.models import max_diff, randomize, tiny_config
from tests.tolerances import bound
from tests.unit.helpers import tensor

EXPERTS, TOP_K, TOKENS = 8, 3, 13
USED = [0, 1, 2, 4, 6]


def make(storage: str = "packed", dtype: torch.dtype = torch.float32) -> K3Experts:
    """Experts whose dense form holds MXFP4 numbers, so that all forms are equal."""
    config = tiny_config(num_experts=EXPERTS, num_experts_per_token=TOP_K)
    config._experts_implementation = "eager"
    experts = K3Experts(config)
    randomize(experts)
    packed = {name: encode(stack.detach()) for name, stack in experts.named_parameters()}
    experts.use_storage("packed")
    with torch.no_grad():
        for name, pair in packed.items():
            for suffix, part in zip(("packed", "scale"), pair, strict=True):
                experts.get_parameter(f"{name}_{suffix}").copy_(part)
    if storage == "dense":
        stacks = [experts.expert_weights(e, dtype) for e in range(EXPERTS)]
        experts.use_storage("dense")
        for name in experts.stack_shapes():
            stack = torch.stack([weights[name] for weights in stacks])
            experts.register_parameter(name, nn.Parameter(stack, requires_grad=False))
    return experts


def routed(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, numbers of the experts in `USED` and weights, with gradients."""
    order = [tensor(len(USED), seed=t).topk(TOP_K).indices for t in range(TOKENS)]
    chosen = torch.tensor(USED)[torch.stack(order)]
    z = tensor(TOKENS, 32, dtype=dtype).requires_grad_()
    return z, chosen, tensor(TOKENS, TOP_K, seed=1).abs().to(torch.float32).requires_grad_()


def layer(storage: str = "packed", r: int = 4, dtype: torch.dtype = torch.float32, **options: Any) -> K3ExpertsLora:
    config = LoraConfig(r=r, lora_alpha=6, target_modules=["experts"], **options)
    made = K3ExpertsLora(make(storage, dtype), "default", config, r=r, lora_alpha=6, target_name="layers.1.experts")
    return fill(made)


def fill(made: K3ExpertsLora, adapter: str = "default", seed: int = 0) -> K3ExpertsLora:
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(made.named_parameters())):
            if parameter.is_floating_point() and parameter.requires_grad:
                parameter.copy_(tensor(*parameter.shape, seed=10 * seed + index) * 0.3)
    return made


def truth(made: K3ExpertsLora, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same with W + scaling B A formed explicitly, plain autograd."""
    plain = UnstackedExperts(made.base_layer)
    total = torch.zeros_like(z)
    for e, expert in enumerate(plain):
        full = {}
        for matrix in ("w1", "w3", "w2"):
            full[matrix] = expert.get_submodule(matrix).weight.detach().to(z.dtype)
            for adapter in made.active_adapters:
                if matrix in made.ratios[adapter]:
                    scaling = made.scaling[adapter] * made.ratios[adapter][matrix]
                    a, b = made._pair(adapter, matrix)
                    full[matrix] = full[matrix] + scaling * b[e] @ a[e]
        token, place = torch.where(chosen == e)
        x = z[token]
        h = made.base_layer._apply_gate(torch.cat([x @ full["w1"].T, x @ full["w3"].T], dim=-1))
        total = total.index_add(0, token, h @ full["w2"].T * weights[token, place, None])
    return total


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, tensors))


def close(a: Tensor, b: Tensor) -> bool:
    """Within fp32 rounding, relative to the largest entry."""
    return max_diff(a, b) <= bound("unit_experts_gradient_fp32_relative") * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("storage", ["dense", "packed"])
def test_values_and_gradients_are_those_of_full_matrices(storage: str) -> None:
    made = layer(storage)
    z, chosen, weights = routed()
    inputs = [z, weights, *(p for p in made.parameters() if p.requires_grad)]
    assert len(inputs) == 2 + 6
    found, expected = made(z, chosen, weights), truth(made, z, chosen, weights)
    assert close(found, expected)
    pull = tensor(*found.shape, seed=5).float()
    for a, b in zip(gradients((found * pull).sum(), *inputs), gradients((expected * pull).sum(), *inputs), strict=True):
        assert b.abs().max() > 1e-3 and close(a, b)


def test_gradients_against_finite_differences() -> None:
    made = layer("dense", dtype=torch.float64).double()
    z, chosen, weights = routed(torch.float64)
    terms, factors = made._terms()

    def run(z: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
        return adapted_experts(made.base_layer, z, chosen, weights, terms, factors)

    factors = [factor.detach().requires_grad_() for factor in factors]
    inputs = (z, weights.detach().double().requires_grad_(), *factors)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_only_experts_in_use_are_decoded_once_in_each_pass() -> None:
    made = layer("packed")
    z, chosen, weights = routed()
    expected = Counter(dict.fromkeys(codes_of(made.base_layer, USED), 1))
    assert set(chosen.unique().tolist()) == set(USED) and len(expected) == 2 * len(USED)
    with counting_decodes() as forward:
        loss = made(z, chosen, weights).square().sum()
    assert forward == expected
    with counting_decodes() as backward:
        loss.backward()
    assert backward == expected
    with counting_decodes() as quiet, torch.no_grad():
        made(z, chosen, weights)
    assert quiet == expected


def test_unused_experts_get_zero_gradients_and_used_ones_do_not() -> None:
    made = layer("packed")
    made(*routed()).square().sum().backward()
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            norms = parameter.grad.flatten(1).norm(dim=1)
            assert [e for e in range(EXPERTS) if norms[e] > 0] == USED, name


def test_nothing_expanded_is_kept_for_the_backward_pass() -> None:
    made, (z, chosen, weights) = layer("packed"), routed()
    kept: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        made(z, chosen, weights)
    own = {p.data_ptr() for p in made.parameters()} | {t.data_ptr() for t in (z, chosen, weights)}
    assert kept and all(saved.data_ptr() in own for saved in kept)


def test_a_change_between_the_passes_is_noticed() -> None:
    made = layer("packed")
    loss = made(*routed()).sum()
    with torch.no_grad():
        made.base_layer.down_proj_scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("matrix", ["w1", "w3", "w2"])
def test_one_matrix_alone(matrix: str) -> None:
    made = layer("packed", rank_pattern={f"experts.{m}": 0 for m in ("w1", "w3", "w2") if m != matrix})
    assert {name for name, p in made.named_parameters() if p.requires_grad} == {
        f"lora_{side}.default.{matrix}" for side in "AB"
    }
    z, chosen, weights = routed()
    assert close(made(z, chosen, weights), truth(made, z, chosen, weights))
    assert max_diff(made(z, chosen, weights), made.base_layer(z, chosen, weights)) > 1e-2


def test_ranks_and_scalings_of_single_matrices() -> None:
    made = layer(
        "packed", rank_pattern={"experts.w2": 2, "experts": 8}, alpha_pattern={"layers.1.experts.w1": 3.0},
        use_rslora=True,
    )  # fmt: skip
    shapes = {m: tuple(p.shape) for m, p in made.lora_A["default"].named_parameters()}
    assert shapes == {"w1": (EXPERTS, 8, 32), "w3": (EXPERTS, 8, 32), "w2": (EXPERTS, 2, 64)}
    scalings = {term.matrix: term.scaling for term in made._terms()[0]}
    assert scalings == pytest.approx({"w1": 3 / 8**0.5, "w3": 6 / 8**0.5, "w2": 6 / 2**0.5})


def test_two_active_adapters_add_up() -> None:
    made = layer("packed")
    made.update_layer("second", 2, 5, LoraConfig(r=2, lora_alpha=5), target_name="experts")
    made.set_adapter(["default", "second"])
    fill(made, "second", seed=3)
    z, chosen, weights = routed()
    assert len(made._terms()[0]) == 6
    assert close(made(z, chosen, weights), truth(made, z, chosen, weights))


def test_dropout_is_the_same_in_both_passes_and_off_outside_of_training() -> None:
    made = layer("dense", dtype=torch.float64, lora_dropout=0.5).double()
    z, chosen, weights = routed(torch.float64)
    torch.manual_seed(0)
    a, b = made(z, chosen, weights), made(z, chosen, weights)
    assert max_diff(a, b) > 1e-3
    # Between two runs from one seed the mask is fixed, and what is left is smooth.
    factor, direction = made.lora_A["default"].w2, tensor(*made.lora_A["default"].w2.shape, seed=7)
    torch.manual_seed(0)
    (grad,) = gradients(made(z, chosen, weights).sum(), factor)
    values = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            factor.add_(direction, alpha=step)
            torch.manual_seed(0)
            values.append(made(z, chosen, weights).sum())
            factor.sub_(direction, alpha=step)
    assert float((grad * direction).sum()) == pytest.approx(float((values[0] - values[1]) / 2e-6), rel=1e-5)
    made.eval()
    expected = truth(made, z, chosen, weights)
    assert max_diff(made(z, chosen, weights), expected) < bound("unit_f64_max_abs") * 100


def test_dropout_keeps_the_mean() -> None:
    made = layer("dense", lora_dropout=0.5, rank_pattern={"experts.w1": 0, "experts.w3": 0})
    z, chosen, weights = (t.detach() for t in routed())
    expected = made.eval()(z, chosen, weights)
    base = made.base_layer(z, chosen, weights)
    made.train()
    with torch.no_grad():
        mean = torch.stack([made(z, chosen, weights) for _ in range(400)]).mean(0)
    assert (mean - expected).norm() < 0.1 * (expected - base).norm()


def test_a_token_of_another_rank_is_left_out() -> None:
    made, (z, chosen, weights) = layer("packed"), routed()
    outside = chosen.masked_fill(chosen == 4, EXPERTS)
    found = made(z, outside, weights)
    assert close(found, truth(made, z, outside, weights))


def test_bf16_is_close_to_fp32_and_keeps_its_dtype() -> None:
    made = layer("packed")
    z, chosen, weights = routed()
    half = z.detach().bfloat16().requires_grad_()
    found = made(half, chosen, weights)
    expected = truth(made, half.detach().float(), chosen, weights)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.02 * expected.norm()
    found.float().sum().backward()
    assert half.grad.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in made.parameters() if p.requires_grad)


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (3, 3), (7, 7), (8, 8), (9, 10), (13, 14), (33, 40), (64, 64)])
def test_rows_come_in_few_sizes_where_shapes_cost_memory(count: int, rows: int) -> None:
    z, token = tensor(100, 4, dtype=torch.float32), torch.arange(count) + 5
    found = _gather(z.bfloat16(), token)
    assert found.shape == (rows, 4) and torch.equal(found[:count], z[token].bfloat16()) and not found[count:].any()
    assert torch.equal(_gather(z, token), z[token])


def test_bf16_gradients_with_padded_rows() -> None:
    """Thirteen tokens for each of three experts: one row of zeros each."""
    made, (z, _, weights) = layer("packed", lora_dropout=0.0), routed()
    chosen = torch.tensor([1, 3, 5]).expand(TOKENS, TOP_K)
    half = z.detach().bfloat16().requires_grad_()
    inputs = [*(p for p in made.parameters() if p.requires_grad), weights]
    pull = tensor(TOKENS, 32, seed=5).float()
    found = gradients((made(half, chosen, weights).float() * pull).sum(), half, *inputs)
    plain = half.detach().float().requires_grad_()
    expected = gradients((truth(made, plain, chosen, weights) * pull).sum(), plain, *inputs)
    for a, b in zip(found, expected, strict=True):
        assert (a.float() - b).norm() < 0.02 * b.norm()


def test_autocast_computes_in_its_dtype() -> None:
    made, (z, chosen, weights) = layer("packed"), routed()
    with torch.autocast("cpu", torch.bfloat16):
        found = made(z, chosen, weights)
    expected = truth(made, z, chosen, weights)
    assert found.dtype == torch.float32 and 1e-4 < (found - expected).norm() / expected.norm() < 0.02
    found.sum().backward()
    assert z.grad.isfinite().all()


def test_frozen_weights_only() -> None:
    made = layer("dense")
    made.base_layer.down_proj.requires_grad_()
    with pytest.raises(ValueError, match="down_proj has requires_grad=True"):
        made(*routed())


def test_a_term_on_no_expert_in_use() -> None:
    """No tokens at all: nothing is computed, and gradients are zero."""
    made = layer("packed")
    z = torch.zeros(0, 32, requires_grad=True)
    found = made(z, torch.zeros(0, TOP_K, dtype=torch.long), torch.zeros(0, TOP_K))
    found.sum().backward()
    assert found.shape == (0, 32)
    assert not made.lora_A["default"].w1.grad.any()
