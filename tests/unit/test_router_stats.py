"""Watching routers: which modules are routers at all, and what is told of their steps."""

import pytest
import torch

from modeling_k3.latent_moe import K3Router
from modeling_k3.training.balancing import RouterBalancer
from modeling_k3.training.router_stats import RouterWatch, summarise
from tests.models import build, tiny_config, token_ids


def test_of_a_routers_copies_the_active_one_counts_and_moves_once() -> None:
    peft = pytest.importorskip("peft")
    base = build(tiny_config("KM", first_k_dense_replace=0))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["gate"])).train()
    balancer = RouterBalancer(model, "sign", rate=0.1)
    named = {name: p for name, p in model.named_parameters() if name.endswith("correction_bias")}
    before = {name: p.detach().clone() for name, p in named.items()}
    model(token_ids(2, 9))
    balancer.step()
    report = balancer.take()
    assert [name.rpartition("gate.")[2] for name in report] == ["modules_to_save.default"] * 2
    assert all(sum(row["load"]) == 2 * 9 * 2 for row in report.values())
    for name, bias in named.items():
        moved = (bias - before[name]).abs().max().item()
        assert moved == pytest.approx(0.1 if "modules_to_save" in name else 0.0)


def feed(router: torch.nn.Module, expert: int, tokens: int) -> None:
    """Send tokens to one expert of a router whose weight is the unit matrix."""
    router(torch.eye(4)[[expert] * tokens])


def test_a_violation_is_that_of_steps_however_many_lie_between_two_reports() -> None:
    """Experts 0 to 3 in turn, one a step: every step is as uneven as can be, and all of them together are even."""
    config = tiny_config(hidden_size=4, num_experts=4, num_experts_per_token=1)
    router = K3Router(config).train()
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    balancer, every, rare = RouterBalancer(router, "none"), [], []
    for is_each in (True, False):
        for step in range(8):
            feed(router, step % 4, 6)
            balancer.step()
            if is_each:
                every.append(summarise(balancer.take()))
        rare.append(summarise(balancer.take()))
    assert rare[0] == {}, "nothing is left of steps that were reported"
    for name in ("router_max_violation", "router_mean_violation", "router_peak_violation", "router_entropy"):
        assert {figures[name] for figures in every} == {rare[1][name]} == {0.0 if name.endswith("entropy") else 3.0}


def test_a_report_has_the_mean_and_the_worst_of_layers_and_of_steps() -> None:
    config = tiny_config(hidden_size=4, num_experts=4, num_experts_per_token=1)
    model = torch.nn.ModuleList(K3Router(config) for _ in range(2)).train()
    for router in model:
        with torch.no_grad():
            router.weight.copy_(torch.eye(4))
    watch = RouterWatch(model)
    # Max over mean: 4 and 1 in the first router, 2 and 2 in the second.
    for loads in (((8,), (4, 4)), ((2, 2, 2, 2), (0, 4, 4))):
        for router, load in zip(model, loads, strict=True):
            for expert, tokens in enumerate(load):
                feed(router, expert, tokens)
        watch.end_step()
    watch.end_step()
    report = watch.take()
    assert [row["load"] for row in report.values()] == [[10, 2, 2, 2], [4, 8, 4, 0]]
    assert [(row["max_over_mean"], row["worst_max_over_mean"]) for row in report.values()] == [(2.5, 4.0), (2.0, 2.0)]
    figures = summarise(report)
    assert figures["router_max_violation"] == 1.5 and figures["router_mean_violation"] == 1.25
    assert figures["router_peak_violation"] == 3.0 and watch.take() == {}
