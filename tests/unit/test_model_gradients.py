"""Gradients of the whole model: against differences in float64, against the slow truth, and in the cases that break."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.configuration import preset_path
from modeling_k3.training.balancing import RouterBalancer
from tests.models import BOUNDS, build, max_diff, randomize, released_weights, tiny_config, token_ids
from tests.models import variant as variant_of
from tests.oracle import Oracle
from tests.tolerances import bound

FAMILY = ["tiny", "plain_residual", "softplus", "low_rank_gate", "no_q_lora", "routes_on_latent", "grouped_softmax"]


def preset_tiny() -> Any:
    """The `tiny` preset in float64, with weights in which everything matters."""
    model = K3ForCausalLM(K3Config.from_pretrained(preset_path("tiny")))
    randomize(model)
    return model.double().train()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The loss in the model's dtype; the library's own is in float32, whatever the model is."""
    logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def all_gradients(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def directions(parameter: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """One random direction over all entries, and the single entry with the largest gradient."""
    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    yield noise / noise.norm()
    yield F.one_hot(parameter.grad.abs().argmax(), parameter.numel()).view_as(parameter).to(parameter.dtype)


def test_every_parameter_against_differences() -> None:
    model, ids = preset_tiny(), token_ids(1, 11, high=250)
    loss_of(model, ids).backward()
    generator, wrong, step = torch.Generator().manual_seed(5), [], 1e-5
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert name.endswith("e_score_correction_bias") and parameter.grad is None
            continue
        # The first mix has one source, which gets all the weight whatever the query is.
        assert ".layers.0.self_attention_res" in name or parameter.grad.abs().max() > 0, name
        for direction in directions(parameter, generator):
            slope = (parameter.grad * direction).sum().item()
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.add_(direction, alpha=sign * step)
                    ends.append(loss_of(model, ids).item())
                    parameter.sub_(direction, alpha=sign * step)
            measured = (ends[0] - ends[1]) / (2 * step)
            if abs(measured - slope) > bound("differences_f64") * max(abs(slope), 1e-2):
                wrong.append((name, slope, measured))
    assert not wrong, wrong


@pytest.mark.parametrize("variant", FAMILY)
def test_every_gradient_is_the_slow_truths(variant: str) -> None:
    model, ids = build(variant_of(variant), dtype=torch.float64).train(), token_ids(1, 9)
    loss_of(model, ids).backward()
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in released_weights(model).items()}
    logits = Oracle(model.config.to_dict(), leaves).run(ids[0]).logits
    F.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    truth = {name: leaf.grad for name, leaf in leaves.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    for name, found in released_weights(model).items():
        expected = torch.zeros_like(found) if truth[name] is None else truth[name]
        assert max_diff(found, expected) < bound("f64_paths_max_abs") * max(1, expected.abs().max().item()), name


@pytest.mark.parametrize("kda", ["recurrent", "chunk", "exact"])
def test_every_form_of_the_recurrence_has_the_same_gradients(kda: str) -> None:
    models = [build(tiny_config("KMK"), dtype=torch.float64).train() for _ in range(2)]
    models[1].set_kda_implementation(kda)
    models[1].set_attn_implementation("eager")
    for model in models:
        loss_of(model, token_ids(2, 70)).backward()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if p.requires_grad:
            assert max_diff(p.grad, q.grad) < bound("f64_paths_max_abs") * max(1, p.grad.abs().max().item()), name


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_without_tokens_have_a_gradient_of_zero(experts: str) -> None:
    """Zero, not None and not NaN, also in the next step, and weight decay still reaches them."""
    model = build(tiny_config()).train()
    model.set_experts_implementation(experts)
    block = model.model.layers[2].block_sparse_moe
    with torch.no_grad():
        block.gate.e_score_correction_bias[:2] = 50.0
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.5)
    before = block.experts.down_proj.detach().clone()
    loss_of(model, token_ids(2, 9)).backward()
    for stack in (block.experts.gate_up_proj, block.experts.down_proj):
        assert stack.grad.isfinite().all() and not stack.grad[2:].any()
        assert all(stack.grad[expert].any() for expert in (0, 1))
    optimizer.step()
    assert torch.allclose(block.experts.down_proj[2:], before[2:] * (1 - 1e-2 * 0.5))


def test_autocast_gradients_stay_near_those_of_float32() -> None:
    """bf16 products, fp32 parameters and gradients; experts that cannot change, since a flip is no rounding error."""
    exact, autocast, rounded = models = [
        build(tiny_config("KM", num_experts=4, num_experts_per_token=4)).train() for _ in range(3)
    ]
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    for model in models:
        with torch.autocast("cpu", torch.bfloat16, enabled=model is autocast):
            loss = loss_of(model, token_ids(2, 40))
        loss.backward()
    for name, parameter in autocast.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name
    expected = all_gradients(exact)
    errors = [((all_gradients(model) - expected).norm() / expected.norm()).item() for model in (autocast, rounded)]
    assert errors[0] < BOUNDS["autocast_gradient"].bound and errors[0] < 2 * errors[1]


def test_training_works_with_deterministic_algorithms() -> None:
    """Every part, balancing and dropping included; two runs are equal to the bit."""
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            config = tiny_config(moe_expert_capacity_factor=1.0, router_balancing="histogram")
            model = build(config).train()
            balancer = RouterBalancer(model)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            for step in range(2):
                ids = token_ids(2, 20, seed=step)
                position = torch.arange(20).remainder(13 - step).expand(2, -1)
                model(ids, labels=ids, position_ids=position, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                balancer.step()
            results.append([p.detach() for p in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
