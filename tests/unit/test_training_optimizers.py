"""Muon and AdamW in one optimizer: who gets what, equality with torch's own, exact resuming."""

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modeling_k3.training.muon import Muon, orthogonalise
from modeling_k3.training.optimizers import MuonAdamW, OptimizerFactory, build_optimizer, parameter_groups
from modeling_k3.training.schedule import cosine_schedule, rate_at, set_progress
from tests.models import build, tiny_config, token_ids


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """The tiny model with every kind of layer."""
    return build(tiny_config())


def by_name(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The group of every parameter."""
    owner = {id(parameter): group for group in groups for parameter in group["params"]}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: owner[id(parameter)] for name, parameter in trained}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Some steps on random tokens that depend on the step alone."""
    for step in steps:
        ids = token_ids(2, 12, seed=step)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# -- who gets what ----------------------------------------------------------------------------------------------------


def test_decay_spares_what_is_no_matrix(model: nn.Module) -> None:
    groups = by_name(model, parameter_groups(model))
    assert len(groups) == sum(parameter.requires_grad for parameter in model.parameters())
    spared = {name for name, group in groups.items() if group["weight_decay"] == 0}
    kinds = ("A_log", "dt_bias", "norm.weight", "res_norm", "res_proj", "conv1d")
    for kind in kinds:
        assert any(kind in name for name in spared), kind
    assert all(any(kind in name for kind in kinds) for name in spared)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.block_sparse_moe.gate.weight"):
        assert groups[name]["weight_decay"] == 0.1 and groups[name]["rule"] == "adamw"


def test_muon_takes_the_matrices_and_their_blocks(model: nn.Module) -> None:
    groups, config = by_name(model, parameter_groups(model)), model.config
    parameters = dict(model.named_parameters())
    muon = {name: group["blocks"] for name, group in groups.items() if group["rule"] == "muon"}
    linear = config.linear_attn_config["head_dim"]
    assert muon["model.layers.0.self_attn.q_proj.weight"] == muon["model.layers.0.self_attn.v_proj.weight"] == (linear,)
    assert muon["model.layers.3.self_attn.q_b_proj.weight"] == (config.qk_nope_head_dim + config.qk_rope_head_dim,)
    assert muon["model.layers.3.self_attn.kv_b_proj.weight"] == (config.qk_nope_head_dim, config.v_head_dim)
    width = config.moe_intermediate_size
    assert muon["model.layers.1.block_sparse_moe.experts.gate_up_proj"] == (width, width)
    assert muon["model.layers.0.self_attn.o_proj.weight"] is None
    assert all(parameters[name].ndim >= 2 for name in muon)
    whole = by_name(model, parameter_groups(model, per_head=False))
    assert whole["model.layers.0.self_attn.q_proj.weight"]["blocks"] is None


def test_frozen_parameters_are_left_out_and_adamw_alone_is_possible() -> None:
    model = build(tiny_config(layers="KM"))
    model.lm_head.weight.requires_grad_(False)
    groups = parameter_groups(model, muon_lr=None)
    assert {group["rule"] for group in groups} == {"adamw"}
    assert not any(parameter is model.lm_head.weight for group in groups for parameter in group["params"])
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"muon_lr": -1.0}, {"weight_decay": -0.1}, {"lr": math.nan}])
def test_what_cannot_be_is_refused(model: nn.Module, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*from 0 up"):
        parameter_groups(model, **options)


def test_nothing_to_train_and_unknown_rules_are_refused() -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        parameter_groups(frozen)
    with pytest.raises(ValueError, match="rule='sgd' is unknown"):
        MuonAdamW([{"params": list(nn.Linear(8, 8).parameters()), "rule": "sgd"}])
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 has shape \(12, 8\).*blocks=\(5,\)"):
        Muon([{"params": [nn.Parameter(torch.zeros(12, 8))], "blocks": (5,)}])
    with pytest.raises(ValueError, match=r"parameter wide\.bias has shape \(8,\)"):
        Muon([("wide.bias", nn.Parameter(torch.zeros(8)))])
    with pytest.raises(ValueError, match="momentum=1"):
        Muon([nn.Parameter(torch.zeros(8, 8))], momentum=1.0)


# -- the rule ---------------------------------------------------------------------------------------------------------


def steps_of(make: Any, shape: tuple[int, ...], count: int = 3) -> Tensor:
    """What an optimizer makes of a parameter under the same random gradients."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = make([parameter])
    for _ in range(count):
        parameter.grad = torch.randn(shape)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_on_a_single_matrix_it_is_torchs_muon(shape: tuple[int, int]) -> None:
    own = steps_of(lambda params: Muon(params, lr=0.1, momentum=0.9, weight_decay=0.2), shape)
    torchs = steps_of(
        lambda params: torch.optim.Muon(params, lr=0.1, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        shape,
    )
    # torch iterates in bfloat16: 1 % of an update whose root mean square is 0.02, three times.
    assert (own - torchs).abs().max() < 2e-2 * 0.1
    assert (own - steps_of(lambda params: Muon(params, lr=0.1, weight_decay=0.2), shape)).abs().max() > 2e-3


def test_blocks_are_updated_as_matrices_of_their_own() -> None:
    stacked = steps_of(lambda params: Muon([{"params": params, "blocks": (8, 16)}]), (2, 48, 12), count=1)
    torch.manual_seed(0)
    start, grad = torch.randn(2, 48, 12), torch.randn(2, 48, 12)
    for expert in range(2):
        for rows in (slice(0, 8), slice(8, 24), slice(24, 32), slice(32, 48)):
            alone = nn.Parameter(start[expert, rows].clone())
            alone.grad = grad[expert, rows].clone()
            Muon([alone]).step()
            assert torch.allclose(stacked[expert, rows], alone, atol=1e-6)


def test_orthogonalise_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(5, 24, 40)))
    assert values.min() > 0.6 and values.max() < 1.3


# -- one state --------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_it_continues_to_the_bit() -> None:
    config = tiny_config(layers="KM", num_experts=4)
    straight, broken = build(config), build(config)
    optimizer = build_optimizer(straight, lr=1e-2, muon_lr=1e-2)
    schedule = cosine_schedule(optimizer, 6)
    first = build_optimizer(broken, lr=1e-2, muon_lr=1e-2)
    other = cosine_schedule(first, 6)
    for step in range(6):
        train(straight, optimizer, range(step, step + 1))
        schedule.step()
        if step < 3:
            train(broken, first, range(step, step + 1))
            other.step()
    file = io.BytesIO()
    torch.save([broken.state_dict(), first.state_dict(), other.state_dict()], file)
    file.seek(0)
    weights, state, progress = torch.load(file, weights_only=True)

    resumed = build(config, seed=5)
    resumed.load_state_dict(weights)
    again = build_optimizer(resumed, lr=3.0, muon_lr=3.0)
    schedule = cosine_schedule(again, 6)
    again.load_state_dict(state)
    schedule.load_state_dict(progress)
    for step in range(3, 6):
        train(resumed, again, range(step, step + 1))
        schedule.step()
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    moments = {key for entry in again.state.values() for key in entry}
    assert moments == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


def test_a_copy_is_independent() -> None:
    model = build(tiny_config(layers="KM", num_experts=4))
    optimizer = OptimizerFactory()(model, lr=1e-2)
    train(model, optimizer, range(1))
    twin = copy.deepcopy(optimizer)
    assert (
        len(twin.state) == len(optimizer.state)
        and twin.param_groups[0]["blocks"] == optimizer.param_groups[0]["blocks"]
    )
    before = {id(p): p.clone() for p in model.parameters()}
    twin.step()
    assert all(torch.equal(before[id(p)], p) for p in model.parameters())


def test_closure_and_absent_gradients() -> None:
    model = build(tiny_config(layers="KM", num_experts=4))
    optimizer = build_optimizer(model)
    before = [parameter.clone() for parameter in model.parameters()]
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_a_group_added_later_is_updated(rule: str) -> None:
    layer, later = nn.Linear(16, 16), nn.Parameter(torch.randn(9, 9))
    optimizer = build_optimizer(layer)
    before, kept = later.detach().clone(), layer.weight.detach().clone()
    with pytest.raises(ValueError, match="rule=None is unknown"):
        optimizer.add_param_group({"params": [later]})
    with pytest.raises(ValueError, match=r"shape \(9, 9\).*blocks=\(5,\)"):
        optimizer.add_param_group({"params": [later], "rule": "muon", "blocks": (5,)})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [later], "rule": rule})
    for parameter in (later, layer.weight):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(later, before) and not torch.equal(layer.weight, kept)
    assert len(optimizer.state_dict()["state"]) == 2 and optimizer.param_groups[-1]["lr"] > 0


# -- the schedule -----------------------------------------------------------------------------------------------------


def test_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    assert rate_at(0.005) == pytest.approx(0.5)
    assert rate_at(0.01) == pytest.approx(1.0)
    assert rate_at(0.505) == pytest.approx(0.5)
    assert rate_at(1.0) == pytest.approx(0.0) and rate_at(2.0, floor=0.1) == pytest.approx(0.1)
    assert rate_at(0.0) > 0


def test_schedule_and_progress_scale_each_groups_peak(model: nn.Module) -> None:
    optimizer = build_optimizer(model, lr=1.0, muon_lr=2.0)
    for share in (0.5, 0.25):
        set_progress(optimizer, share)
        assert {group["lr"] for group in optimizer.param_groups} == {share, 2 * share}
    optimizer = build_optimizer(model, lr=1.0, muon_lr=2.0)
    schedule = cosine_schedule(optimizer, 1000)
    assert {group["lr"] for group in optimizer.param_groups} == {0.02, 0.04}
    assert schedule.lr_lambdas[0](505) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="num_training_steps=0"):
        cosine_schedule(optimizer, 0)
    for options in ({"warmup": 2.0}, {"warmup": -0.1}, {"floor": -1.0}, {"floor": math.nan}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.*from 0 to 1"):
            cosine_schedule(optimizer, 10, **options)
