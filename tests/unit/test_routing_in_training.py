"""What routing adds while a model trains: an order among ties, a capacity, the balancing loss."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3.latent_moe import K3Router
from tests.models import build, tiny_config, token_ids, variant, within

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def router_of(dtype: torch.dtype = torch.float32, **changes: Any) -> K3Router:
    router = K3Router(tiny_config(**changes)).to(dtype).train()
    torch.nn.init.normal_(router.weight, std=0.2, generator=torch.Generator().manual_seed(0))
    return router


def by_hand(values: Tensor, count: int) -> list[list[int]]:
    """The rule in plain words: larger first, the lower number first among equals."""
    return [sorted(range(len(row)), key=lambda e: (-row[e], e))[:count] for row in values.tolist()]


@DTYPES
@pytest.mark.parametrize("experts", [8, 200])
def test_ties_go_to_the_lower_number(dtype: torch.dtype, experts: int) -> None:
    router = router_of(dtype, num_experts=experts, num_experts_per_token=5)
    values = torch.randint(-2, 3, (50, experts), generator=torch.Generator().manual_seed(1)).to(dtype) / 4
    values[values == 0] *= -1
    values[:, ::3] = values[:, ::3].abs()
    assert router._choose(values).tolist() == by_hand(values, 5)


@DTYPES
def test_near_ties_and_extremes_are_told_apart(dtype: torch.dtype) -> None:
    """Neighbouring floating-point numbers, both signs, denormals, infinities."""
    router = router_of(dtype, num_experts=16, num_experts_per_token=16)
    info = torch.finfo(dtype)
    one = torch.tensor([1.0, -1.0, 0.0, info.tiny, -info.tiny, info.max, -torch.inf, 0.25], dtype=dtype)
    values = torch.cat([one, torch.nextafter(one, torch.full_like(one, -torch.inf))]).unsqueeze(0)
    assert router._choose(values).tolist() == by_hand(values, 16)


def test_tied_groups_go_to_the_lower_number() -> None:
    router = router_of(num_expert_group=4, topk_group=2)
    assert router._choose(torch.ones(1, 8)).tolist() == [[0, 1]]
    assert router._choose(torch.tensor([[0.0, 0, 1, 1, 1, 1, 1, 1]])).tolist() == [[2, 3]]


def test_capacity_is_first_come_first_served() -> None:
    router = router_of(num_experts=4, num_experts_per_token=1, moe_expert_capacity_factor=1.5)
    chosen = torch.tensor([[0], [0], [1], [0], [0], [0], [0], [0]])
    assert router.overflow(chosen).flatten().tolist() == [False, False, False, False, True, True, True, True]
    real = torch.tensor([False, True, True, True, True, False, True, True])
    # Six real tokens make a capacity of 3; the first 0 is padding and takes no place.
    assert router.overflow(chosen, real).flatten().tolist() == [False] * 6 + [True, True]


def test_dropped_places_weigh_nothing_in_training_only() -> None:
    free, tight = router_of(), router_of(moe_expert_capacity_factor=0.5)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    _, weights, chosen = free(x)
    _, less, same = tight(x)
    overflow = tight.overflow(chosen)
    assert overflow.any() and torch.equal(chosen, same)
    assert torch.equal(less, weights.masked_fill(overflow, 0))
    assert torch.bincount(chosen[~overflow], minlength=8).max() <= 0.5 * 40 * 2 / 8
    assert torch.equal(tight.eval()(x)[1], free.eval()(x)[1])


def test_a_later_token_changes_no_earlier_one() -> None:
    model = build(tiny_config("KM", moe_expert_capacity_factor=0.75)).train()
    ids = token_ids(1, 24)
    changed = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % 157], dim=1)
    assert within(model(ids).logits[:, :-1], model(changed).logits[:, :-1], "same_function_fp32")


def test_the_balancing_loss_follows_its_equation() -> None:
    router = router_of(torch.float64, moe_router_activation_func="softmax")
    with torch.no_grad():
        router.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    x = torch.randn(20, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits, _, chosen = router(x)
    scores, expected = logits.softmax(-1), 0.0
    for expert in range(8):
        f = 8 / (20 * 2) * (chosen == expert).sum().item()
        expected += f * scores[:, expert].mean().item()
    assert router.balance_loss(logits).item() == pytest.approx(expected, rel=1e-12)
    real = torch.arange(20) < 7
    assert router.balance_loss(logits, real).item() == pytest.approx(router.balance_loss(logits[:7]).item(), rel=1e-12)
    router.balance_loss(logits).backward()
    assert router.weight.grad.abs().max() > 0 and router.e_score_correction_bias.grad is None


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_an_even_router_has_loss_one(scoring: str) -> None:
    router = router_of(moe_router_activation_func=scoring, num_experts_per_token=1)
    logits = 30 * torch.eye(8)
    assert router.balance_loss(logits).item() == pytest.approx(1.0, rel=0.2 if scoring == "sigmoid" else 1e-5)
    lopsided = 30 * torch.eye(8)[[0] * 8]
    assert router.balance_loss(lopsided) > 1.2


def aux_model(**changes: Any) -> Any:
    return build(variant("tiny", router_balancing="aux_loss", router_aux_loss_coef=0.5, **changes)).train()


def test_the_loss_gains_the_balancing_loss_in_training_only() -> None:
    ids, model, plain = token_ids(2, 12), aux_model(), build(tiny_config()).train()
    output = model(ids, labels=ids)
    assert output.loss.item() == pytest.approx(plain(ids, labels=ids).loss.item() + 0.5 * output.aux_loss.item())
    assert output.aux_loss.item() > 1 and plain(ids, labels=ids).aux_loss is None
    assert torch.equal(model.eval()(ids, labels=ids).loss, plain.eval()(ids, labels=ids).loss)
    assert model(ids, labels=ids).aux_loss is None
    # Preference trainers ask for it and weigh it themselves.
    assert model(ids, output_router_logits=True).aux_loss.item() == pytest.approx(output.aux_loss.item())
    assert plain(ids, output_router_logits=True).aux_loss is None


def test_the_balancing_loss_ignores_padding() -> None:
    ids, model = token_ids(1, 12), aux_model()
    padded = torch.cat([torch.full((1, 5), 3), ids], dim=1)
    mask = torch.arange(17).unsqueeze(0) >= 5
    labels = padded.masked_fill(~mask, -100)
    a = model(ids, labels=ids.index_fill(1, torch.tensor([0]), -100)).aux_loss
    b = model(padded, attention_mask=mask.long(), labels=labels).aux_loss
    assert within(a, b, "same_loss_fp32")


def test_the_balancing_loss_reads_no_mask_of_pairs() -> None:
    pairs = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 1, 6, 6\)"):
        aux_model()(token_ids(1, 6), attention_mask=pairs, labels=token_ids(1, 6))


def test_accumulated_balancing_losses_are_a_mean_by_labels() -> None:
    ids, model = token_ids(2, 12), aux_model()
    labels = ids.clone()
    labels[1, 5:] = -100
    both = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=15) for i in range(2)]
    ce = [model.eval()(ids[i : i + 1], labels=labels[i : i + 1]).loss.item() for i in range(2)]
    expected = sum(n / 15 * (c + 0.5 * each.aux_loss.item()) for n, c, each in zip((11, 4), ce, both, strict=True))
    assert sum(each.loss.item() for each in both) == pytest.approx(expected, rel=1e-5)


def test_checkpointing_keeps_the_balancing_gradient_or_says_so() -> None:
    ids, gradients = token_ids(2, 12), []
    for checkpoints in (False, True):
        model = aux_model()
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids).loss.backward()
        gradients.append(torch.cat([m.weight.grad for m in model.modules() if isinstance(m, K3Router)]))
    assert within(*gradients, "same_gradient_fp32") and gradients[0].abs().max() > 0
    model = aux_model()
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="use_reentrant"):
        model(ids, labels=ids)


def test_of_a_routers_copies_the_balancing_loss_is_about_the_one_that_chose() -> None:
    """peft's `modules_to_save` keeps the router and puts a trained copy beside it, here with another bias."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["gate"])
    model = peft.get_peft_model(aux_model(layers="KMM", first_k_dense_replace=0), lora).train()
    routers = {name: module for name, module in model.named_modules() if isinstance(module, K3Router)}
    with torch.no_grad():
        for seed, router in enumerate(routers.values()):
            router.e_score_correction_bias.normal_(generator=torch.Generator().manual_seed(seed))
    copies = [router for name, router in routers.items() if "modules_to_save" in name]
    originals = [router for name, router in routers.items() if "original_module" in name]
    assert len(copies) == len(originals) == 3
    ids, found = token_ids(2, 12), []
    for used in (copies, originals):
        with nullcontext() if used is copies else model.disable_adapter():
            output = model(input_ids=ids, output_router_logits=True)
        losses = [r.balance_loss(each).item() for r, each in zip(used, output.router_logits, strict=True)]
        assert output.aux_loss.item() == pytest.approx(sum(losses) / 3, rel=1e-6)
        found.append(output.aux_loss.item())
    assert abs(found[0] - found[1]) > 1e-3
