"""Absorbed and blockwise latent attention against the expanded definition, values and gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import K3Cache, mla_forms
from modeling_k3.attention_span import AttentionSpan
from modeling_k3.mla import K3MLAttention
from modeling_k3.mla_forms import latent_attention, prefers_absorbed
from tests.models import build, max_diff, randomize, tiny_config, token_ids
from tests.tolerances import bound
from tests.unit.helpers import tensor

B, H, S, RANK, NOPE, ROPE, VALUE = 2, 3, 37, 10, 6, 4, 5
SPANS: dict[str, dict[str, Any]] = {
    "causal": {},
    "padding": {"real": torch.rand(B, S, generator=torch.Generator().manual_seed(1)) < 0.7},
    "a row of padding": {"real": torch.tensor([[True] * S, [False] * S])},
    "documents": {"documents": torch.arange(S).expand(B, S) // 9},
}


def truth(query: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, span: AttentionSpan) -> Tensor:
    """Expand everything, form all scores, one softmax."""
    up = weight.unflatten(0, (H, NOPE + VALUE))
    k = torch.einsum("bsr,hnr->bhsn", latent, up[:, :NOPE])
    k = torch.cat([k, shared.unsqueeze(1).expand(-1, H, -1, -1)], dim=-1)
    v = torch.einsum("bsr,hnr->bhsn", latent, up[:, NOPE:])
    scores = query @ k.mT / math.sqrt(NOPE + ROPE)
    for b in range(B):
        for t in range(query.shape[2]):
            for s in range(S):
                documents = span.documents
                sees = s <= span.past + t and (span.real is None or bool(span.real[b, s]))
                sees = sees and (documents is None or bool(documents[b, s] == documents[b, span.past + t]))
                if not sees:
                    scores[b, :, t, s] = torch.finfo(scores.dtype).min
    return (scores.softmax(-1) @ v).transpose(1, 2)


def parts(length: int) -> list[Tensor]:
    query = tensor(B, H, length, NOPE + ROPE)
    return [query, tensor(B, S, RANK), tensor(B, S, ROPE), tensor(H * (NOPE + VALUE), RANK)]


@pytest.mark.parametrize("block", [4, 16, 1024])
@pytest.mark.parametrize("absorb", [True, False])
@pytest.mark.parametrize("length", [1, 5, S])
@pytest.mark.parametrize("name", SPANS)
def test_both_forms_are_the_definition(
    name: str, length: int, absorb: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_forms, "KEY_BLOCK", block)
    monkeypatch.setattr(mla_forms, "_TILE_SCORES", block * 12)
    span = AttentionSpan(S - length, **SPANS[name])
    leaves = [x.requires_grad_() for x in parts(length)]
    real = torch.ones(B, length, dtype=torch.bool) if span.real is None else span.real[:, S - length :]
    probe = tensor(B, length, H, VALUE, seed=3) * real[..., None, None]
    results = []
    for form in (truth, None):
        scaling = 1 / math.sqrt(NOPE + ROPE)
        o = form(*leaves, span) if form else latent_attention(*leaves, span, scaling=scaling, absorb=absorb)[0]
        assert o.isfinite().all()
        results.append([o[real], *torch.autograd.grad((o * probe).sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert max_diff(a, b) < bound("f64_paths_max_abs")


@pytest.mark.parametrize("absorb", [True, False])
def test_weights_are_those_of_the_definition(absorb: bool) -> None:
    query, latent, shared, weight = parts(5)
    o, weights = latent_attention(
        query, latent, shared, weight, AttentionSpan(S - 5), scaling=0.3, absorb=absorb, output_weights=True
    )
    plain, none = latent_attention(query, latent, shared, weight, AttentionSpan(S - 5), scaling=0.3, absorb=absorb)
    assert none is None and weights.shape == (B, H, 5, S)
    assert max_diff(weights.sum(-1), torch.ones(B, H, 5)) < bound("unit_f64_max_abs")
    assert max_diff(o, plain) < bound("unit_f64_max_abs")


def test_the_form_follows_the_query_length() -> None:
    """At the released dimensions the expansion of the history pays from about 170 new tokens on."""
    assert prefers_absorbed(1, 512, 128, 128) and prefers_absorbed(170, 512, 128, 128)
    assert not prefers_absorbed(171, 512, 128, 128)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [1, 3, 12])
def test_the_module_gives_the_same_with_a_span_and_with_a_mask(implementation: str, length: int) -> None:
    config = tiny_config("MM", num_experts=None, attn_implementation=implementation)
    module = K3MLAttention(config, 0)
    randomize(module)
    module.double()
    x, results = tensor(2, 20, 64), []
    span = AttentionSpan(20 - length)
    for mode in ("span", "mask", "adapter"):
        cache = K3Cache(config)
        module(x[:, : 20 - length], module._pair_mask(AttentionSpan(0), x[:, None, : 20 - length]), cache)
        leaf = x[:, 20 - length :].clone().requires_grad_()
        if mode == "mask":
            y, _ = module(leaf, module._pair_mask(span, leaf[:, None]), cache)
        else:
            if mode == "adapter":
                # Something else than a plain matrix: its weight is not read, the history is expanded.
                module.kv_b_proj = torch.nn.Sequential(module.kv_b_proj)
            y, _ = module(leaf, None, cache, span=span)
        results.append((y, *torch.autograd.grad((y * tensor(2, length, 64, seed=5)).sum(), [leaf])))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert max_diff(a, b) < bound("f64_paths_max_abs")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_long_history_in_low_precision(dtype: torch.dtype) -> None:
    """Scores and sums are float32: the absorbed step in bf16 is as near to float64 as the expanded one."""
    query, latent, shared, weight = parts(1)
    query, latent, shared, weight = (x.to(dtype) for x in (query, latent, shared, weight))
    expected = truth(*(x.double() for x in (query, latent, shared, weight)), AttentionSpan(S - 1))
    o, _ = latent_attention(
        query, latent, shared, weight, AttentionSpan(S - 1), scaling=(NOPE + ROPE) ** -0.5, absorb=True
    )
    assert o.dtype == dtype
    assert (o.double() - expected).norm() / expected.norm() < bound("unit_mla_bf16_relative")


def test_no_mask_per_pair_is_made_for_a_long_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in pieces stays flat in memory only if nothing grows with pieces times history."""
    largest = 0
    original = AttentionSpan.allowed

    def watch(self: AttentionSpan, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
        nonlocal largest
        rule = original(self, rows, keys, device)
        largest = max(largest, 0 if rule is None else rule.numel())
        return rule

    monkeypatch.setattr(AttentionSpan, "allowed", watch)
    monkeypatch.setattr(mla_forms, "KEY_BLOCK", 16)
    monkeypatch.setattr(mla_forms, "_TILE_SCORES", 16 * 3 * 8)
    # Narrow heads, so that a piece of eight tokens expands its history.
    model = build(tiny_config("MM", num_experts=None, kv_lora_rank=64, qk_nope_head_dim=4, v_head_dim=4))
    cache, ids = K3Cache(model.config), token_ids(1, 160)
    with torch.no_grad():
        for piece in ids.split(8, dim=1):
            out = model(piece, cache=cache).logits
        whole = model(ids).logits
    assert 0 < largest <= 16 * 8
    assert max_diff(out, whole[:, -8:]) < bound("unit_model_fp32_max_abs")


def test_autocast_does_not_reach_the_scores() -> None:
    """A decode step under autocast keeps float32 scores: far closer to the plain one than a bf16 softmax would be."""
    query, latent, shared, weight = (x.float() for x in parts(1))
    options = {"scaling": 0.3, "absorb": True}
    plain, _ = latent_attention(query, latent, shared, weight, AttentionSpan(S - 1), **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = latent_attention(query, latent, shared, weight, AttentionSpan(S - 1), **options)
        half, _ = latent_attention(query.bfloat16(), latent, shared, weight, AttentionSpan(S - 1), **options)
    assert torch.equal(inside, plain) and half.dtype == torch.bfloat16
