"""Balancing: what each rule computes, that micro-batches and processes add up, and what must not count."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from modeling_k3.latent_moe import K3Router
from modeling_k3.training.balancing import RouterBalancer
from modeling_k3.training.callback import K3TrainingCallback
from modeling_k3.training.router_stats import summarise
from modeling_k3.training.rules import HistogramRule, balanced_bias
from tests.models import build, tiny_config, token_ids

METHODS = pytest.mark.parametrize("method", ["quantile", "histogram", "sign"])
QUANTILES = pytest.mark.parametrize("method", ["quantile", "histogram"])


def router_of(experts: int = 32, top_k: int = 4, **changes: Any) -> K3Router:
    """A router whose weights are normal numbers."""
    router = K3Router(tiny_config(num_experts=experts, num_experts_per_token=top_k, **changes)).train()
    torch.nn.init.normal_(router.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return router


def stream(tokens: int, seed: int) -> Tensor:
    """Tokens [tokens, 64] with a common direction, which makes some experts much more popular than others."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(64, generator=torch.Generator().manual_seed(77))
    return torch.randn(tokens, 64, generator=generator) + 2 * common


def max_over_mean(router: K3Router, x: Tensor) -> float:
    load = torch.bincount(router(x)[2].flatten(), minlength=router.num_experts).double()
    return (load.max() / load.mean()).item()


def model_of(**changes: Any) -> Any:
    return build(tiny_config("KM", first_k_dense_replace=0, **changes)).train()


def biases(model: Any) -> Tensor:
    return torch.stack([p.detach().clone() for n, p in model.named_parameters() if n.endswith("correction_bias")])


@QUANTILES
def test_quantiles_balance_unseen_batches_within_a_few_steps(method: str) -> None:
    router = router_of()
    balancer = RouterBalancer(router, method)
    assert max_over_mean(router, stream(4096, 1000)) > 4
    unseen = []
    for step in range(6):
        router(stream(4096, step))
        balancer.step()
        unseen.append(max_over_mean(router.eval(), stream(4096, 2000 + step)))
        router.train()
    assert max(unseen[3:]) < 1.3, unseen


def test_the_sign_rule_needs_far_more_steps() -> None:
    router = router_of()
    balancer = RouterBalancer(router, "sign", rate=1e-3)
    for step in range(60):
        router(stream(1024, step))
        balancer.step()
    assert max_over_mean(router, stream(4096, 2000)) > 2


def test_with_the_cutoffs_held_every_expert_gets_its_share() -> None:
    """What the equation says of one batch, counted."""
    scores, bias = torch.rand(4000, 32, generator=torch.Generator().manual_seed(0)), torch.linspace(-0.3, 0.3, 32)
    wanted = balanced_bias(scores, bias, 4)
    cutoff = (scores + bias).topk(5, dim=-1).values[:, -1:]
    offset = torch.quantile(cutoff - scores, 4 / 32, dim=0).mean()
    # Tokens whose cutoff an expert set itself all lack exactly its bias: there the share is met within the tie.
    most, least = ((scores + wanted + offset + d > cutoff).sum(dim=0) for d in (1e-6, -1e-6))
    assert (most >= 499).all() and (least <= 501).all() and wanted.mean().abs() < 1e-6


def test_the_batch_form_is_the_librarys_quantile() -> None:
    scores = torch.rand(301, 16, generator=torch.Generator().manual_seed(1))
    cutoff = scores.topk(4, dim=-1).values[:, -1:]
    expected = -torch.quantile(scores - cutoff, 1 - 3 / 16, dim=0)
    assert torch.allclose(balanced_bias(scores, torch.zeros(16), 3), expected - expected.mean(), atol=1e-6)


def test_the_histogram_is_exact_to_a_bin() -> None:
    router = router_of()
    with torch.no_grad():
        router.e_score_correction_bias.copy_(torch.linspace(-0.4, 0.4, 32))
    scores, bias = torch.rand(999, 32), router.e_score_correction_bias.detach()
    expected = balanced_bias(scores, bias, 4)
    for bins in (50, 1000):
        rule = HistogramRule(router, bins)
        for piece in scores.split([1, 500, 498]):
            rule.add(piece, piece)
        assert (rule.bias() - expected).abs().max() <= 2 * 2.8 / bins
        assert rule.bias() is None


def test_bins_stay_where_they_were_while_they_are_counted() -> None:
    router = router_of()
    rules, scores = [HistogramRule(router, 100), HistogramRule(router, 100)], torch.rand(99, 32)
    for rule in rules:
        rule.add(scores, scores)
    expected = rules[0].bias()
    with torch.no_grad():
        router.e_score_correction_bias.copy_(torch.linspace(-3, 5, 32))
    assert torch.equal(rules[1].bias(), expected)


@METHODS
def test_micro_batches_are_one_batch(method: str) -> None:
    moved = []
    for pieces in ([300], [1, 99, 200]):
        router = router_of()
        balancer = RouterBalancer(router, method, rate=1e-2)
        for piece in stream(300, 0).split(pieces):
            before = router.e_score_correction_bias.clone()
            router(piece)
            assert torch.equal(before, router.e_score_correction_bias)
        balancer.step()
        moved.append(router.e_score_correction_bias.detach().clone())
    assert torch.equal(*moved) and moved[0].abs().max() > 0


@METHODS
def test_a_step_forgets_the_tokens_of_the_one_before(method: str) -> None:
    router, fresh = router_of(), router_of()
    balancer = RouterBalancer(router, method, rate=1e-2)
    router(stream(300, 0))
    balancer.step()
    fresh.load_state_dict(router.state_dict())
    other = RouterBalancer(fresh, method, rate=1e-2)
    for each, moves in ((router, balancer), (fresh, other)):
        each(stream(300, 1).neg())
        moves.step()
    assert torch.equal(router.e_score_correction_bias, fresh.e_score_correction_bias)


def test_sign_rule_by_hand() -> None:
    router = router_of(experts=4, top_k=1)
    balancer = RouterBalancer(router, "sign", rate=0.5)
    with torch.no_grad():
        router.weight.zero_()
        router.e_score_correction_bias.copy_(torch.tensor([0.1, 0.3, 0.2, 0.0]))
    router(torch.zeros(8, 64))
    balancer.step()
    assert torch.allclose(router.e_score_correction_bias, torch.tensor([0.6, -0.2, 0.7, 0.5]))


@METHODS
def test_memory_keeps_a_share_of_the_old_bias(method: str) -> None:
    whole, half = (router_of(), router_of())
    for router, memory in ((whole, 0.0), (half, 0.5)):
        balancer = RouterBalancer(router, method, rate=1e-2, memory=memory)
        router(stream(256, 0))
        balancer.step()
    assert torch.allclose(half.e_score_correction_bias * 2, whole.e_score_correction_bias)


@METHODS
def test_evaluation_teaches_nothing(method: str) -> None:
    model = model_of()
    balancer, before = RouterBalancer(model, method), biases(model)
    model.eval()(token_ids(2, 9))
    with torch.no_grad():
        model.train()(token_ids(2, 9))
    balancer.step()
    assert torch.equal(biases(model), before) and balancer.take() == {}
    model(token_ids(2, 9))
    balancer.step()
    assert not torch.equal(biases(model), before)


@METHODS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_influence(method: str, side: str) -> None:
    ids, results = token_ids(2, 9), []
    for padded in (False, True):
        model = model_of(moe_expert_capacity_factor=1.0)
        balancer = RouterBalancer(model, method)
        mask = None
        if padded:
            filler, real = torch.full((2, 30), 3), torch.ones(2, 9, dtype=torch.long)
            order = slice(None, None, -1 if side == "left" else 1)
            mask = torch.cat([real, torch.zeros_like(filler)][order], dim=1)
            x = torch.cat([ids, filler][order], dim=1)
        logits = model(ids if mask is None else x, attention_mask=mask).logits
        results.append((logits if mask is None else logits[mask.bool()].view_as(results[0][0]), balancer.take()))
        model(ids if mask is None else x, attention_mask=mask)
        balancer.step()
        results[-1] += (biases(model),)
    assert results[0][1] == results[1][1]
    assert torch.allclose(results[0][0], results[1][0], atol=1e-4)
    assert torch.allclose(results[0][2], results[1][2], atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_no_token_twice(reentrant: bool) -> None:
    reports = []
    for checkpoints in (False, True):
        model = model_of()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        balancer = RouterBalancer(model, "histogram")
        model(token_ids(2, 9), labels=token_ids(2, 9)).loss.backward()
        reports.append((balancer.take(), [rule.counts().clone() for rule in balancer.rules.values()]))
    assert reports[0][0] == reports[1][0] and len(reports[0][0]) == 2
    assert sum(reports[0][0]["model.layers.0.block_sparse_moe.gate"]["load"]) == 2 * 9 * 2
    assert all(torch.equal(a, b) for a, b in zip(reports[0][1], reports[1][1], strict=True))


def test_a_frozen_router_keeps_its_bias() -> None:
    model = model_of()
    model.model.layers[0].block_sparse_moe.gate.weight.requires_grad_(False)
    balancer, before = RouterBalancer(model, "quantile"), biases(model)
    model(token_ids(2, 9))
    balancer.step()
    assert torch.equal(biases(model)[0], before[0]) and not torch.equal(biases(model)[1], before[1])
    assert len(balancer.take()) == 2


def test_the_config_chooses_and_an_optimizer_is_followed() -> None:
    model = model_of(router_balancing="sign", router_bias_update_rate=0.25)
    balancer, before = RouterBalancer(model), biases(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    balancer.follow(optimizer)
    model(token_ids(2, 9), labels=token_ids(2, 9)).loss.backward()
    optimizer.step()
    moved = (biases(model) - before).abs()
    assert balancer.method == "sign" and torch.allclose(moved[moved > 0], torch.tensor(0.25))
    balancer.close()
    after = biases(model)
    model(token_ids(2, 9))
    optimizer.step()
    assert torch.equal(biases(model), after) and balancer.take()


@pytest.mark.parametrize("method", ["none", "aux_loss"])
def test_ways_that_move_no_bias(method: str) -> None:
    model = model_of(router_balancing=method, router_aux_loss_coef=0.1)
    balancer, before = RouterBalancer(model), biases(model)
    model(token_ids(2, 9))
    balancer.step()
    assert torch.equal(biases(model), before) and len(balancer.take()) == 2


def test_what_is_refused() -> None:
    for options in ({"method": "best"}, {"method": "sign", "memory": 1.0}, {"method": "histogram", "bins": 1}, {}):
        with pytest.raises(ValueError, match=r"allowed|must|has no K3Config"):
            RouterBalancer(router_of(), **options)
    grouped = model_of(num_expert_group=4, topk_group=2)
    with pytest.raises(ValueError, match="quantiles know no groups"):
        RouterBalancer(grouped)
    RouterBalancer(grouped, "sign")
    assert not RouterBalancer(torch.nn.Linear(2, 2)).rules


def test_numbers_and_a_loss_that_nothing_adds_are_refused() -> None:
    model = model_of()
    for rate in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"rate=.*above 0"):
            RouterBalancer(model, "sign", rate=rate)
    with pytest.raises(ValueError, match=r"method='aux_loss' with config.router_balancing='quantile'"):
        RouterBalancer(model, "aux_loss")
    RouterBalancer(model_of(router_balancing="aux_loss", router_aux_loss_coef=0.1), "aux_loss")
    for options in ({"method": "quantle"}, {"memory": 3.0}):
        with pytest.raises(ValueError, match=r"allowed|must be"):
            K3TrainingCallback(**options)


def test_figures_of_a_known_load() -> None:
    router = router_of(experts=4, top_k=1, moe_expert_capacity_factor=2.0)
    balancer = RouterBalancer(router, "none")
    with torch.no_grad():
        router.weight.zero_()
    router(torch.zeros(8, 64))
    row = balancer.take()[""]
    ratios = {"max_over_mean": 4.0, "worst_max_over_mean": 4.0}
    assert row == {"load": [8, 0, 0, 0], "entropy": pytest.approx(0.0), **ratios, "dropped": 0.5}
    assert summarise({"": row})["router_max_violation"] == 3.0
    router(torch.zeros(8, 64), torch.arange(8) < 2)
    assert balancer.take()[""]["dropped"] == 0.5
    assert math.isfinite(row["entropy"]) and balancer.take() == {}


def _result(method: str, pieces: slice) -> tuple[str, list[float], list[int]]:
    """Train a router for two steps on some of three micro-batches: how, its bias, and its load."""
    router = router_of()
    balancer = RouterBalancer(router, method, rate=1e-2)
    for step in range(2):
        for piece in stream(300, step).split([100, 30, 170])[pieces]:
            router(piece)
        balancer.step()
    return balancer.method, router.e_score_correction_bias.tolist(), balancer.take()[""]["load"]


def _train_on_a_share(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = [_result(method, slice(rank, None, 2)) for method in ("quantile", "histogram", "sign")]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Each process sees other tokens, even other numbers of them; one of them has two micro-batches."""
    mp.spawn(_train_on_a_share, (str(tmp_path),), nprocs=2)
    expected = [list(_result(method, slice(None))) for method in ("histogram", "histogram", "sign")]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected
