"""The router against the equations, group by group, and what stands around the routed experts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modeling_k3.latent_moe import K3LatentMoE, K3Router
from tests.models import max_diff, randomize, tiny_config
from tests.tolerances import bound
from tests.unit.helpers import tensor

#: What the router may be asked to do, beside the released setting.
ROUTERS: dict[str, dict[str, Any]] = {
    "released": {},
    "softmax": {"moe_router_activation_func": "softmax"},
    "not renormalised": {"moe_renormalize": False},
    "scaled": {"routed_scaling_factor": 2.446},
    "one of eight": {"num_experts_per_token": 1},
    "all of eight": {"num_experts_per_token": 8},
    "groups": {"num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 3},
    "one group of two": {"num_expert_group": 2, "topk_group": 1, "num_experts_per_token": 4},
    "as many groups as there are": {"num_expert_group": 2, "topk_group": 2},
    "grouped softmax": {
        "num_expert_group": 4,
        "topk_group": 2,
        "moe_router_activation_func": "softmax",
        "moe_renormalize": False,
        "routed_scaling_factor": 2.5,
    },
}


def truth(config: Any, weight: Tensor, bias: Tensor, x: Tensor) -> list[dict[int, float]]:
    """Expert -> weight for each token, number by number."""
    size, results = config.num_experts // config.num_expert_group, []
    for row in (x.double() @ weight.double().T).tolist():
        if config.moe_router_activation_func == "sigmoid":
            scores = [1 / (1 + math.exp(-value)) for value in row]
        else:
            scores = [math.exp(value - max(row)) for value in row]
            scores = [score / sum(scores) for score in scores]
        choice = [score + b for score, b in zip(scores, bias.tolist(), strict=True)]
        if 1 < config.num_expert_group > config.topk_group:
            groups = [range(start, start + size) for start in range(0, config.num_experts, size)]
            groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
            allowed = [e for group in groups[: config.topk_group] for e in group]
        else:
            allowed = list(range(config.num_experts))
        chosen = sorted(allowed, key=lambda e: -choice[e])[: config.num_experts_per_token]
        total = 1.0
        if config.moe_renormalize and len(chosen) > 1:
            total = sum(scores[e] for e in chosen) + 1e-20
        results.append({e: scores[e] / total * config.routed_scaling_factor for e in chosen})
    return results


def make_router(dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[K3Router, Any]:
    config = tiny_config(**changes)
    router = K3Router(config)
    router.weight.data = tensor(*router.weight.shape, seed=3, scale=0.25)
    router.e_score_correction_bias.data = tensor(config.num_experts, seed=4, scale=0.3).float()
    return router.to(dtype), config


def as_dicts(weights: Tensor, chosen: Tensor) -> list[dict[int, float]]:
    return [dict(zip(c, w, strict=True)) for c, w in zip(chosen.tolist(), weights.tolist(), strict=True)]


@pytest.mark.parametrize("name", ROUTERS)
def test_router_follows_the_equations(name: str) -> None:
    router, config = make_router(**ROUTERS[name])
    x = tensor(50, 64)
    logits, weights, chosen = router(x)
    assert logits.shape == (50, 8) and weights.shape == chosen.shape == (50, config.num_experts_per_token)
    assert max_diff(logits, x @ router.weight.T) < bound("unit_f64_max_abs")
    expected = truth(config, router.weight, router.e_score_correction_bias, x)
    for found, right in zip(as_dicts(weights, chosen), expected, strict=True):
        assert found.keys() == right.keys()
        assert all(abs(found[e] - right[e]) < bound("unit_f64_max_abs") for e in right)


def test_a_huge_bias_selects_and_never_weighs() -> None:
    router, _ = make_router(routed_scaling_factor=2.0)
    x = tensor(20, 64)
    with torch.no_grad():
        router.e_score_correction_bias[5] = 1e4
    logits, weights, chosen = router(x)
    assert (chosen == 5).any(1).all()
    scores = logits.sigmoid().gather(1, chosen)
    assert max_diff(weights, 2.0 * scores / scores.sum(1, keepdim=True)) < bound("unit_f64_max_abs")
    assert max_diff(weights.sum(1), torch.full((20,), 2.0)) < bound("unit_f64_max_abs")


def test_a_group_is_ranked_by_the_sum_of_its_two_best() -> None:
    """Group 0 has the best expert, group 1 the best pair: with one group allowed, group 1 wins."""
    router, _ = make_router(num_expert_group=2, topk_group=1)
    with torch.no_grad():
        router.weight.zero_()  # all scores 0.5
        router.e_score_correction_bias.copy_(torch.tensor([1.0, 0, 0, 0, 0.7, 0.6, 0, 0]))
    _, _, chosen = router(tensor(1, 64))
    assert sorted(chosen[0].tolist()) == [4, 5]


def test_negative_biases_never_let_an_excluded_group_back_in() -> None:
    """Excluded experts are minus infinity, not zero: every allowed choice here is below zero."""
    router, _ = make_router(num_expert_group=4, topk_group=2, num_experts_per_token=4)
    with torch.no_grad():
        router.e_score_correction_bias.copy_(torch.tensor([-9.0, -9, -5, -5, -8, -8, -5, -5]))
    _, _, chosen = router(tensor(10, 64))
    assert all(sorted(row) == [2, 3, 6, 7] for row in chosen.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_in_a_half_precision_model(dtype: torch.dtype) -> None:
    """Logits of exact products: near 256, bf16 would round 256.5 away and tie the first two experts."""
    router, _ = make_router(dtype, moe_router_activation_func="softmax")
    with torch.no_grad():
        router.weight.zero_()
        router.weight[0, 0], router.weight[1, 0], router.weight[1, 1] = 16.0, 16.0, 0.5
        router.e_score_correction_bias.zero_()
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 0], x[0, 1] = 16.0, 1.0
    logits, weights, chosen = router(x)
    assert logits.dtype == weights.dtype == torch.float32
    assert logits[0, :2].tolist() == [256.0, 256.5] and chosen[0].tolist() == [1, 0]
    assert abs(weights[0, 0].item() - 1 / (1 + math.exp(-0.5))) < bound("unit_fp32_max_abs")


def test_autocast_does_not_reach_the_scores() -> None:
    router, _ = make_router(torch.float32)
    x = tensor(20, 64, dtype=torch.float32)
    plain = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = router(x)
    assert inside[0].dtype == inside[1].dtype == torch.float32
    assert all(torch.equal(*pair) for pair in zip(inside, plain, strict=True))


def test_gradients_reach_the_router_and_never_its_bias() -> None:
    router, _ = make_router()
    x = tensor(20, 64).requires_grad_()
    assert not router.e_score_correction_bias.requires_grad
    router(x)[1].pow(2).sum().backward()
    assert router.weight.grad.abs().max() > 0 and x.grad.abs().max() > 0
    assert router.e_score_correction_bias.grad is None
    chosen = router(x)[2]

    def weigh(x: Tensor, weight: Tensor) -> Tensor:
        _, weights, now = torch.func.functional_call(router, {"weight": weight}, (x,))
        assert torch.equal(now, chosen[:3])
        return weights

    assert torch.autograd.gradcheck(weigh, (x[:3].detach().requires_grad_(), router.weight))


# -- the block ----------------------------------------------------------------------------------------------------


def make_block(**changes: Any) -> K3LatentMoE:
    block = K3LatentMoE(tiny_config(**changes)).double()
    randomize(block)
    return block


def count_calls(module: nn.Module) -> list[tuple[int, ...]]:
    """The shapes a module is called with, as a list that grows."""
    shapes: list[tuple[int, ...]] = []
    module.register_forward_hook(lambda m, args, output: shapes.append(tuple(args[0].shape)))
    return shapes


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


BLOCKS: dict[str, dict[str, Any]] = {
    "released": {},
    "no latent norm": {"latent_moe_use_norm": False},
    "full width": {"routed_expert_hidden_size": None},
    "no shared": {"num_shared_experts": None},
    "full width, norm asked for in vain": {"routed_expert_hidden_size": None, "latent_moe_use_norm": True},
    "routes on the latent": {"router_input": "latent"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_follows_the_equations(name: str) -> None:
    block, config = make_block(**BLOCKS[name]), tiny_config(**BLOCKS[name])
    x = tensor(2, 5, 64)
    flat = x.flatten(0, 1)
    z = flat
    if config.routed_expert_hidden_size is not None:
        z = flat @ block.routed_expert_down_proj.weight.T
    source = z if config.router_input == "latent" else flat
    routes = truth(config, block.gate.weight, block.gate.e_score_correction_bias, source)
    s = torch.zeros_like(z)
    for t, route in enumerate(routes):
        for expert, weight in route.items():
            g, u = (block.experts.gate_up_proj[expert] @ z[t]).chunk(2)
            inner = 4 * (g / 4).tanh() * g.sigmoid() * 25 * (u / 25).tanh()
            s[t] += weight * (block.experts.down_proj[expert] @ inner)
    if config.routed_expert_hidden_size is not None:
        if config.latent_moe_use_norm:
            s = rms(s, block.routed_expert_norm.weight, config.rms_norm_eps)
        s = s @ block.routed_expert_up_proj.weight.T
    if config.num_shared_experts is not None:
        g, u = flat @ block.shared_experts.gate_proj.weight.T, flat @ block.shared_experts.up_proj.weight.T
        inner = 4 * (g / 4).tanh() * g.sigmoid() * 25 * (u / 25).tanh()
        s = s + inner @ block.shared_experts.down_proj.weight.T
    y = block(x)
    assert y.shape == x.shape and max_diff(y.flatten(0, 1), s) < bound("f64_paths_max_abs")


def test_latent_projections_run_once_for_all_tokens() -> None:
    block = make_block()
    down, up = count_calls(block.routed_expert_down_proj), count_calls(block.routed_expert_up_proj)
    norm, shared = count_calls(block.routed_expert_norm), count_calls(block.shared_experts)
    block(tensor(2, 5, 64))
    assert down == shared == [(10, 64)] and up == norm == [(10, 32)]


def test_the_router_reads_the_width_it_is_told() -> None:
    assert make_block().gate.weight.shape == (8, 64)
    assert make_block(router_input="latent").gate.weight.shape == (8, 32)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("count", "width"), [(None, None), (0, 0), (1, 64), (3, 192)])
def test_shared_experts_are_one_mlp_of_their_joint_width(count: int | None, width: int | None) -> None:
    """0 builds one of width zero, as the release does; None builds none. Both add nothing."""
    block = make_block(num_shared_experts=count)
    assert hasattr(block, "shared_experts") == (width is not None)
    if width is not None:
        assert block.shared_experts.gate_proj.weight.shape == (width, 64)
    if not count:
        twin = make_block(num_shared_experts=2)
        shared_parts = {name: x for name, x in block.state_dict().items() if not name.startswith("shared_experts.")}
        twin.load_state_dict(shared_parts, strict=False)
        twin.shared_experts.down_proj.weight.data.zero_()
        x = tensor(2, 5, 64)
        assert max_diff(block(x), twin(x)) < bound("unit_f64_max_abs")


def test_every_part_gets_a_gradient_and_training_changes_nothing() -> None:
    block, x = make_block(), tensor(2, 5, 64).requires_grad_()
    assert torch.equal(block.train()(x), block.eval()(x))
    block(x).pow(2).sum().backward()
    without = {name for name, p in block.named_parameters() if p.grad is None or p.grad.abs().max() == 0}
    assert without == {"gate.e_score_correction_bias"} and x.grad.isfinite().all()


def test_one_token_and_a_transposed_input() -> None:
    block, x = make_block(), tensor(5, 2, 64).transpose(0, 1)
    assert not x.is_contiguous()
    assert max_diff(block(x), block(x.contiguous())) < bound("unit_f64_max_abs")
    assert max_diff(block(x[:1, :1]), block(x)[:1, :1]) < bound("f64_paths_max_abs")
