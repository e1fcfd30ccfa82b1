"""What a forward accepts, checked before anything is computed, and the masks it works with."""

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.utils import is_torchdynamo_compiling

from .cache import K3Cache
from .configuration_k3 import K3Config

#: Arguments with which callers describe several documents packed into one row.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def is_tracing() -> bool:
    """Whether a graph is being recorded; checks that look at values are left out then."""
    return is_torchdynamo_compiling() or torch.jit.is_tracing()


def check_inputs(config: K3Config, input_ids: Tensor | None, inputs_embeds: Tensor | None, kwargs: dict) -> None:
    """Refuse what the model cannot compute.

    Raises:
        ValueError: both or neither of `input_ids` and `inputs_embeds`; wrong rank or width; ids outside the
            vocabulary (looked at in eager mode only); packed sequences.
    """
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {given}")
    if input_ids is not None:
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; allowed is [batch, tokens]")
        if not is_tracing() and input_ids.numel() and not input_ids.is_meta:
            low, high = input_ids.min().item(), input_ids.max().item()
            if low < 0 or high >= config.vocab_size:
                raise ValueError(
                    f"input_ids contains {low if low < 0 else high}; allowed are 0 to {config.vocab_size - 1} "
                    f"(vocab_size={config.vocab_size})"
                )
    elif inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)}; allowed is [batch, tokens, {config.hidden_size}]"
        )
    packing = [name for name in _PACKING if kwargs.get(name) is not None]
    if packing:
        raise ValueError(f"{', '.join(packing)}: packed sequences are not supported yet; pad them into rows instead")


def check_cache(cache: object, batch: int, num_layers: int) -> None:
    """Refuse a cache that cannot hold the state of this model.

    Raises:
        TypeError: not a K3Cache (recognised by what it can do: two copies of this code may meet in one process).
        ValueError: made for another depth or filled with another batch size.
    """
    if not hasattr(cache, "linear_layer"):
        raise TypeError(
            f"cache is a {type(cache).__name__}; allowed is a K3Cache, as made by K3Cache(model.config) or by generate"
        )
    if len(cache.layers) != num_layers:
        raise ValueError(f"cache was made for {len(cache.layers)} layers, the model has {num_layers}")
    held = cache.held_batch_size
    if held is not None and held != batch:
        raise ValueError(f"cache holds a batch of {held} rows, the input has {batch}")


def padding_mask(attention_mask: Tensor | None, batch: int, length: int, cache: K3Cache | None) -> Tensor | None:
    """Return [batch, length] bool, False at padding among the new tokens, or None where nothing is padded.

    Args:
        attention_mask: [batch, seen + length], 1 or True for real tokens, over everything the cache has seen and the
            new tokens; None means that nothing is padded.

    Raises:
        ValueError: another rank, shape or value; or None although padding is in the cache.
    """
    seen = 0 if cache is None else cache.get_seq_length()
    if attention_mask is None:
        if cache is not None and cache.has_padding:
            raise ValueError(
                f"attention_mask=None, but the cache holds padding; allowed is a mask [{batch}, {seen + length}] over "
                "all positions seen so far and the new ones"
            )
        return None
    if attention_mask.ndim != 2 or tuple(attention_mask.shape) != (batch, seen + length):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; allowed is [{batch}, {seen + length}], 1 for "
            "real tokens and 0 for padding (the recurrence of KDA cannot follow a mask per pair of tokens)"
        )
    mask = attention_mask.to(torch.bool)
    if is_tracing():
        return mask[:, seen:]
    if attention_mask.dtype != torch.bool and not torch.equal(mask.to(attention_mask.dtype), attention_mask):
        raise ValueError("attention_mask contains other values than 0 and 1")
    return None if mask[:, seen:].all() else mask[:, seen:]


def check_positions(position_ids: Tensor | None, padding: Tensor | None) -> None:
    """Refuse positions that restart inside a row: they mean packed documents, which would leak into each other.

    K3 has no positional encoding, so positions are otherwise not read.

    Raises:
        ValueError: neighbouring real tokens whose positions are not consecutive.
    """
    if position_ids is None or position_ids.shape[-1] < 2 or is_tracing() or position_ids.is_meta:
        return
    steps = position_ids[..., 1:] - position_ids[..., :-1]
    consecutive = steps == 1
    if padding is not None:
        consecutive = consecutive | ~(padding[:, 1:] & padding[:, :-1])
    if not consecutive.all():
        raise ValueError(
            "position_ids are not consecutive inside a row: packed sequences are not supported yet; pad them into rows "
            "instead"
        )


def full_attention_mask(
    config: K3Config, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: K3Cache | None
) -> Tensor | None:
    """Return the causal mask in the form that the attention implementation in use expects."""
    layer_idx = config.layer_types.index("full_attention")
    return create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        cache=cache,
        layer_idx=layer_idx,
    )
