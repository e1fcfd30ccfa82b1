"""Watching routers: which modules are routers at all."""

import pytest

from modeling_k3.training.balancing import RouterBalancer
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
