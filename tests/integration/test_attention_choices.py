"""Flex and flash attention for MLA: the same numbers as eager, whatever is padded, packed or cached.

Flex runs here, compiled for the CPU. Flash attention wants a GPU: transformers' own code around it runs, and in the
place of its two kernels stand-ins with their signatures, which compute the same from lengths alone.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import masking_utils
from transformers import modeling_flash_attention_utils as library
from transformers.integrations import flex_attention as flex_library
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_k3 import K3Cache, K3ForCausalLM, K3StaticCache
from modeling_k3.modeling_k3 import K3PreTrainedModel
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound

IDS = token_ids(2, 12)
FLASH = ["flash_attention_2", "flash_attention_3"]


@pytest.fixture(scope="module")
def eager() -> K3ForCausalLM:
    """A KDA and two MLA layers; keys are wider than values, as released."""
    model = build(tiny_config("KMM", eos_token_id=None)).requires_grad_(False)
    model.set_attn_implementation("eager")
    assert model.model.layers[1].self_attn.scaling ** -2 > model.config.v_head_dim
    return model


# -- the stand-in for flash attention's kernels -------------------------------------------------------------------


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Rows [n, H, d] behind each other, one sequence after the other; causal counts from the end, as in the kernel."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and causal and dropout_p == 0.0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (cu_seqlens_q[-1], cu_seqlens_k[-1]) == (len(q), len(k))
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    out = torch.zeros_like(q)
    for begin_q, end_q, begin_k, end_k in zip(
        cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist(),
        strict=True,
    ):  # fmt: skip
        rows, keys = end_q - begin_q, end_k - begin_k
        if rows:
            scores = torch.einsum("qhd,khd->hqk", q[begin_q:end_q], k[begin_k:end_k]) * softmax_scale
            later = torch.arange(keys) > torch.arange(keys - rows, keys)[:, None]
            p = scores.masked_fill(later, -torch.inf).softmax(-1)
            out[begin_q:end_q] = torch.einsum("hqk,khd->qhd", p, v[begin_k:end_k])
    return out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """[B, T, H, d] without padding."""
    borders = [torch.arange(len(x) + 1, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out = flash_attn_varlen_func(*rows, *borders, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal)
    return out.unflatten(0, q.shape[:2])


def with_flash(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Let transformers find the stand-ins where it looks for the kernels, and no GPU missing."""

    def counted(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(kernel.__name__)
            return kernel(*args, **kwargs)

        run.__signature__ = inspect.signature(kernel)
        return run

    kernels = counted(flash_attn_func), counted(flash_attn_varlen_func), None, library._pad_input, library._unpad_input
    monkeypatch.setattr(library, "_lazy_imports", lambda *args, **kwargs: kernels)
    monkeypatch.setattr(library, "_loaded_implementation", None)
    monkeypatch.setattr(K3PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)


@pytest.fixture(params=[*FLASH, "flex_attention"])
def fused(request: pytest.FixtureRequest, eager: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model with one of the implementations, and what it called."""
    model, calls = copy.deepcopy(eager), []
    if request.param in FLASH:
        with_flash(monkeypatch, calls)
    else:
        # The same functions without the compiler, which takes ten seconds for each shape; compiled: see below.
        def count(*args: Any, training: bool, **kwargs: Any) -> Tensor:
            calls.append("flex_attention")
            assert len({x.shape[-1] for x in args}) == 1
            return flex_attention(*args, **kwargs)

        monkeypatch.setattr(flex_library, "compile_friendly_flex_attention", count)
        make = masking_utils.create_block_mask
        monkeypatch.setattr(
            masking_utils, "create_block_mask", lambda **options: make(**{**options, "_compile": False})
        )
    model.set_attn_implementation(request.param)
    assert model.config._attn_implementation == request.param
    return model, calls


# -- the same numbers -----------------------------------------------------------------------------------------------


def padding(kind: str) -> Tensor | None:
    """None, or a mask with padding on one side, or on all."""
    mask = torch.ones_like(IDS)
    if kind in ("left", "everywhere"):
        mask[0, :4] = 0
    if kind in ("right", "everywhere"):
        mask[1, 9:] = 0
    if kind == "everywhere":
        mask[0, 7] = 0
    return None if kind == "none" else mask


@pytest.mark.parametrize("kind", ["none", "left", "right", "everywhere"])
def test_padding(fused: Any, eager: K3ForCausalLM, kind: str) -> None:
    model, calls = fused
    mask = padding(kind)
    real = torch.ones_like(IDS).bool() if mask is None else mask.bool()
    found, expected = (m(IDS, attention_mask=mask, use_cache=False).logits for m in (model, eager))
    assert len(calls) == 2 and found.isfinite().all()
    assert max_diff(found[real], expected[real]) < bound("unit_model_fp32_max_abs")


@pytest.mark.parametrize("kind", ["none", "left", "right"])
def test_packed_documents(fused: Any, eager: K3ForCausalLM, kind: str) -> None:
    model, calls = fused
    mask = padding(kind)
    real = torch.ones_like(IDS).bool() if mask is None else mask.bool()
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 2 + [1] + [2] * 9])
    options = {"attention_mask": mask, "seq_idx": documents, "use_cache": False}
    found, expected = (m(IDS, **options).logits for m in (model, eager))
    assert len(calls) == 2
    assert max_diff(found[real], expected[real]) < bound("unit_model_fp32_max_abs")
    alone = eager(IDS[:1, 7:]).logits
    assert max_diff(found[:1, 7:], alone) < bound("unit_model_fp32_max_abs")


def test_borders_as_a_collator_gives_them(fused: Any, eager: K3ForCausalLM) -> None:
    model, _ = fused
    borders = torch.tensor([0, 5, 12, 20, 24], dtype=torch.int32)
    options = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 24, "max_length_k": 24}
    ids = IDS.reshape(1, -1)
    found, expected = (m(ids, use_cache=False, **options).logits for m in (model, eager))
    assert max_diff(found, expected) < bound("unit_model_fp32_max_abs")


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("is_static", [False, True])
def test_pieces(fused: Any, eager: K3ForCausalLM, kind: str, is_static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long pieces read the whole history through the implementation; few tokens stay with the absorbed form."""
    model, calls = fused
    mask = padding(kind)
    real = torch.ones_like(IDS).bool() if mask is None else mask.bool()
    expected = eager(IDS, attention_mask=mask, use_cache=False).logits
    for is_long in (False, True):
        calls.clear()
        monkeypatch.setattr("modeling_k3.call_masks.prefers_absorbed", lambda *_, is_long=is_long: not is_long)
        cache = K3StaticCache(model.config, max_cache_len=20) if is_static else K3Cache(model.config)
        found, stop = [], 0
        for piece in IDS.split([5, 1, 4, 2], dim=1):
            stop += piece.shape[1]
            found.append(model(piece, attention_mask=None if mask is None else mask[:, :stop], cache=cache).logits)
        assert max_diff(torch.cat(found, dim=1)[real], expected[real]) < bound("unit_model_fp32_max_abs")
        assert len(calls) == (8 if is_long else 2)


def test_generating(fused: Any, eager: K3ForCausalLM) -> None:
    model, _ = fused
    options = {"attention_mask": padding("left"), "max_new_tokens": 6, "do_sample": False}
    expected = eager.generate(IDS, **options)
    for more in ({}, {"cache_implementation": "static"}, {"num_beams": 2}, {"prefill_chunk_size": 5}):
        wanted = eager.generate(IDS, **options, **more) if "num_beams" in more else expected
        assert torch.equal(model.generate(IDS, **options, **more), wanted), more


def test_weights_that_cannot_be_read_as_a_matrix(fused: Any, eager: K3ForCausalLM) -> None:
    """An adapter around W_kvb: what few tokens read of the history goes through a mask per pair of tokens then."""

    class Wrapped(nn.Linear):
        """Some other class."""

    model, _ = fused
    for layer in model.model.layers[1:]:
        layer.self_attn.kv_b_proj.__class__ = Wrapped
    mask, cache = padding("left"), K3Cache(model.config)
    expected = eager(IDS, attention_mask=mask, use_cache=False).logits[:, -1:]
    model(IDS[:, :-1], attention_mask=mask[:, :-1], cache=cache)
    assert max_diff(model(IDS[:, -1:], attention_mask=mask, cache=cache).logits, expected) < bound(
        "unit_model_fp32_max_abs"
    )


def test_flash_gets_half_precision_and_gradients_flow(eager: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with_flash(monkeypatch, calls)
    gradients = []
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 2 + [1] + [2] * 9])
    for name in ("eager", "flash_attention_2"):
        model = copy.deepcopy(eager).requires_grad_(True)
        model.set_attn_implementation(name)
        model(IDS, seq_idx=documents, labels=IDS, use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert set(calls) == {"flash_attn_varlen_func"} and gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert max_diff(gradients[1][name], gradient) < 1e-4 * max(1.0, gradient.abs().max().item()), name
    seen: set[torch.dtype] = set()
    half = copy.deepcopy(eager).bfloat16()
    half.set_attn_implementation("flash_attention_2")
    monkeypatch.setattr(library, "_flash_fn", lambda q, k, v, **_: seen.update({q.dtype, k.dtype, v.dtype}) or q)
    half(IDS, use_cache=False)
    assert seen == {torch.bfloat16}


# -- what cannot be -------------------------------------------------------------------------------------------------


def test_attention_weights_are_refused_or_missing(fused: Any) -> None:
    model, _ = fused
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    found = model(IDS, output_attentions=True, use_cache=False).attentions
    assert list(found) == [None] * 3


def test_what_flex_returns_on_a_gpu_is_no_weights(eager: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(eager)
    model.set_attn_implementation("flex_attention")

    def with_sums(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return query.transpose(1, 2), query.sum(-1)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", with_sums)
    assert list(model(IDS, output_attentions=True, use_cache=False).attentions) == [None] * 3


def test_other_masks_per_pair_of_tokens_are_refused(fused: Any) -> None:
    model, _ = fused
    with pytest.raises(ValueError, match="mask"):
        model(IDS, attention_mask=torch.ones(2, 1, 12, 12), use_cache=False)


def test_flash_without_its_package_or_a_gpu_says_so() -> None:
    with pytest.raises((ImportError, ValueError), match=r"(?i)flash"):
        K3ForCausalLM._from_config(tiny_config(), attn_implementation="flash_attention_2")


def test_flex_on_a_cpu_does_not_train(eager: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no backward pass for it there, and says what to do."""
    model = copy.deepcopy(eager).requires_grad_(True)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        model(IDS, labels=IDS, use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "left"])
def test_flex_compiled(eager: K3ForCausalLM, kind: str) -> None:
    model = copy.deepcopy(eager)
    model.set_attn_implementation("flex_attention")
    mask = padding(kind)
    real = torch.ones_like(IDS).bool() if mask is None else mask.bool()
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 2 + [1] + [2] * 9])
    for more in ({}, {"seq_idx": documents}):
        found, expected = (m(IDS, attention_mask=mask, use_cache=False, **more).logits for m in (model, eager))
        assert max_diff(found[real], expected[real]) < bound("unit_model_fp32_max_abs")
