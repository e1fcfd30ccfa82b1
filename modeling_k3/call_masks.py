"""The masks that one forward works with, read from everything that says which tokens see which."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from .attention_span import FLEX, OWN_FORMS, AttentionSpan, is_flash
from .cache import K3Cache
from .configuration_k3 import K3Config
from .masks import PACKING_ARGUMENTS, check_goes_on, check_positions, is_tracing, padding_mask, read_documents
from .mla_forms import prefers_absorbed
from .packing import Packing

_NO_PACKING = "{}: packed sequences cannot be cached or continue a cache; allowed is cache=None, or one row for each"


class CallMasks(NamedTuple):
    """What one forward reads of its masks.

    Args:
        padding: [B, T] bool, False at padding among the new tokens; None: no padding there.
        packing: documents in the rows; None: each row is one.
        full: for MLA, what the attention implementation in use expects; None: causal, or see `span`.
        span: for MLA in the place of `full` where there is a history or a packed row.
    """

    padding: Tensor | None
    packing: Packing | None
    full: Tensor | None
    span: AttentionSpan | None


def read_call(
    config: K3Config,
    embeds: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: K3Cache | None,
    kwargs: dict,
) -> CallMasks:
    """Read and check everything that says which tokens see which. Changes nothing.

    Raises:
        ValueError: see `padding_mask` and `read_documents`; packed sequences with a cache; a static cache without
            room for the new tokens.
    """
    batch, length = embeds.shape[:2]
    if cache is not None and cache.max_cache_len is not None:
        if is_tracing():
            return _read_in_graph(config, embeds, attention_mask, position_ids, cache, kwargs)
        cache.check_room(length)
        attention_mask = _without_room(attention_mask, cache, length)
    padding = padding_mask(attention_mask, batch, length, cache)
    packed = [name for name in PACKING_ARGUMENTS if kwargs.get(name) is not None]
    documents = None if packed and cache is not None else read_documents(position_ids, padding, batch, length, kwargs)
    if cache is not None and (packed or documents is not None):
        raise ValueError(_NO_PACKING.format(", ".join(packed) or "position_ids are not consecutive inside a row"))
    if cache is not None:
        check_goes_on(position_ids, padding, cache)
    packing = None if documents is None else Packing(documents, padding)
    past = 0 if cache is None else cache.get_seq_length()
    if "full_attention" not in config.layer_types:
        return CallMasks(padding, packing, None, None)
    real = _real_tokens(padding, cache, batch, length, embeds.device)
    implementation = config._attn_implementation
    if past and (implementation in OWN_FORMS or _is_short(config, length)):
        return CallMasks(padding, packing, None, AttentionSpan(past, real))
    if packing is None:
        documents_alike = None
    elif implementation in OWN_FORMS:
        return CallMasks(padding, packing, None, AttentionSpan(past, real, documents))
    elif is_flash(implementation):
        # It is told where documents begin and end; see `mla`.
        return CallMasks(padding, packing, None, None)
    elif implementation == FLEX:
        documents_alike = _same_document(documents)
    else:
        allowed = (*OWN_FORMS, FLEX, "flash_attention_2", "flash_attention_3")
        raise ValueError(f"packed sequences with attn_implementation={implementation!r}; allowed are {allowed}")
    full = create_causal_mask(
        config=config,
        inputs_embeds=embeds,
        attention_mask=real,
        cache=cache,
        layer_idx=config.layer_types.index("full_attention"),
        and_mask_function=documents_alike,
    )
    return CallMasks(padding, packing, full, None)


def _is_short(config: K3Config, length: int) -> bool:
    """Whether so few new tokens are cheaper without expanding the history, which only our own forms can do."""
    is_ours = config._attn_implementation == FLEX or is_flash(config._attn_implementation)
    return is_ours and prefers_absorbed(length, config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim)


def _same_document(documents: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule that keeps documents apart, in the form of which block masks are made."""

    def is_same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents[row, query] == documents[row, key]

    return is_same


def _real_tokens(
    padding: Tensor | None, cache: K3Cache | None, batch: int, length: int, device: torch.device
) -> Tensor | None:
    """[batch, seen + length] bool, False at padding, or None where there is none at all."""
    seen = 0 if cache is None else cache.get_seq_length()
    known = None if cache is None else cache.real
    if padding is None and known is None:
        return None
    if known is None:
        known = torch.ones(batch, seen, dtype=torch.bool, device=device)
    if padding is None:
        padding = torch.ones(batch, length, dtype=torch.bool, device=device)
    return torch.cat([known.to(device), padding.to(device)], dim=1)


def _without_room(attention_mask: Tensor | None, cache: K3Cache, length: int) -> Tensor | None:
    """A mask [B, N] over all that a static cache has room for, cut to what it has seen and the new tokens."""
    is_wide = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    if is_wide and attention_mask.shape[1] == cache.max_cache_len:
        return attention_mask[:, : cache.get_seq_length() + length]
    return attention_mask


def _read_in_graph(
    config: K3Config,
    embeds: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: K3Cache,
    kwargs: dict,
) -> CallMasks:
    """Read the masks of a graph with a static cache, whose shapes do not depend on how many tokens there are.

    Args:
        attention_mask: [B, N], or [B, seen + length], of which there is one graph for changing lengths.
        others: see `read_call`. What a graph cannot branch on is checked while it runs.

    Raises:
        ValueError: see `read_call`.
    """
    batch, length = embeds.shape[:2]
    # Of this moment: the layers count on in place.
    position, total = cache.position.to(embeds.device).clone(), cache.max_cache_len
    packed = [name for name in PACKING_ARGUMENTS if kwargs.get(name) is not None]
    if packed:
        raise ValueError(_NO_PACKING.format(", ".join(packed)))
    torch._assert_async(position + length <= total, f"the static cache has no room behind max_cache_len={total}")
    padding = real = None
    if attention_mask is None and cache.has_padding:
        raise ValueError("attention_mask=None, but the cache holds padding; allowed is a mask over all positions")
    if attention_mask is not None:
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] > total:
            shape = tuple(attention_mask.shape)
            raise ValueError(f"attention_mask has shape {shape}; allowed in a graph is [{batch}, up to {total}]")
        covered = attention_mask.shape[1]
        fits = (position + length == covered) | torch.tensor(covered == total, device=embeds.device)
        torch._assert_async(fits, "attention_mask covers neither all that was seen nor all that there is room for")
        real = F.pad(attention_mask.to(torch.bool), (0, total - covered), value=True)
        padding = real.index_select(1, position + torch.arange(length, device=embeds.device))
    check_positions(position_ids, padding)
    span = AttentionSpan(total - length, real, None, position)
    return CallMasks(padding, None, None, span if "full_attention" in config.layer_types else None)
