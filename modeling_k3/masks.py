"""What a forward accepts, checked before anything is computed."""

import torch
from torch import Tensor
from transformers.utils import is_torchdynamo_compiling

from .attention_span import read_pair_mask
from .cache import K3Cache
from .configuration_k3 import K3Config
from .packing import documents_from_lengths

#: Arguments with which callers describe several documents packed into one row.
PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
#: Arguments with which callers hand over images.
IMAGE_ARGUMENTS = ("pixel_values", "pixel_values_videos", "image_embeds", "image_grid_thw", "grid_thws")


def is_tracing() -> bool:
    """Whether a graph is being recorded; checks that look at values are left out then."""
    return is_torchdynamo_compiling() or torch.jit.is_tracing()


def check_inputs(config: K3Config, input_ids: Tensor | None, inputs_embeds: Tensor | None, kwargs: dict) -> None:
    """Refuse what the model cannot compute.

    Raises:
        ValueError: both or neither of `input_ids` and `inputs_embeds`; wrong rank or width; no token; ids outside the
            vocabulary (looked at in eager mode only); attention that is not causal.
    """
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {given}")
    if input_ids is not None:
        if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
            kind = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise TypeError(f"input_ids is a {kind}; allowed is a tensor of torch.int64 or torch.int32")
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; allowed is [batch, tokens]")
        if not is_tracing() and input_ids.numel() and not input_ids.is_meta:
            low, high = torch.stack(input_ids.aminmax()).tolist()
            if low < 0 or high >= config.vocab_size:
                raise ValueError(
                    f"input_ids contains {low if low < 0 else high}; allowed are 0 to {config.vocab_size - 1} "
                    f"(vocab_size={config.vocab_size})"
                )
    elif inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)}; allowed is [batch, tokens, {config.hidden_size}]"
        )
    shape = tuple((input_ids if input_ids is not None else inputs_embeds).shape[:2])
    if 0 in shape:
        raise ValueError(f"the input has shape {shape}; allowed is at least one row of at least one token")
    images = [name for name in IMAGE_ARGUMENTS if kwargs.get(name) is not None]
    if images:
        raise ValueError(f"{', '.join(images)}: image input is not supported; allowed is text, this is the text model")
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal=False is not possible: a recurrence sees only what came before; allowed is True")


def check_cache(cache: object, batch: int, config: K3Config) -> None:
    """Refuse a cache that cannot hold the state of this model.

    Raises:
        TypeError: not a K3Cache (recognised by what it can do: two copies of this code may meet in one process).
        ValueError: made for other layers, filled by another model or with another batch size, or with layers that
            have not seen the same number of tokens.
    """
    if not hasattr(cache, "linear_layer"):
        raise TypeError(
            f"cache is a {type(cache).__name__}; allowed is a K3Cache, as made by K3Cache(model.config) or by generate"
        )
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(f"cache was made for {len(cache.layers)} layers, the model has {config.num_hidden_layers}")
    kinds = ["linear_attention" if is_linear else "full_attention" for is_linear in cache.is_linear]
    if kinds != config.layer_types:
        raise ValueError(f"cache was made for layers {kinds}, the model has {config.layer_types}")
    held = cache.held_batch_size
    if held is not None and held != batch:
        raise ValueError(f"cache holds a batch of {held} rows, the input has {batch}")
    if is_tracing():
        return
    lengths = {layer.get_seq_length() for layer in cache.layers}
    if len(lengths) > 1:
        raise ValueError(f"cache is damaged: its layers have seen {sorted(lengths)} tokens; use a fresh K3Cache")
    state = (config.kda_num_heads, config.kda_head_dim, config.kda_head_dim)
    latent = (config.kv_lora_rank, config.qk_rope_head_dim)
    for index, layer in enumerate(cache.layers):
        if cache.is_linear[index]:
            found = None if layer.state is None else tuple(layer.state.shape[1:])
            wanted = state
        else:
            found = (layer.keys.shape[-1], layer.values.shape[-1]) if layer.get_seq_length() else None
            wanted = latent
        if found not in (None, wanted):
            raise ValueError(f"cache was filled by another model: layer {index} holds {found}, this model has {wanted}")


def padding_mask(attention_mask: Tensor | None, batch: int, length: int, cache: K3Cache | None) -> Tensor | None:
    """Return [batch, length] bool, False at padding among the new tokens, or None where nothing is padded.

    Args:
        attention_mask: [batch, seen + length], 1 or True for real tokens, over everything the cache has seen and the
            new tokens; or [batch, 1, length, seen + length] per pair of tokens, if it says nothing else than causal
            attention to real tokens; None means that nothing is padded.

    Raises:
        ValueError: another rank, shape or value; None although padding is in the cache; a mask that disagrees with
            the one under which the cache was filled.
    """
    seen = 0 if cache is None else cache.get_seq_length()
    known = None if cache is None else cache.real
    if attention_mask is None:
        if cache is not None and cache.has_padding:
            raise ValueError(
                f"attention_mask=None, but the cache holds padding; allowed is a mask [{batch}, {seen + length}] over "
                "all positions seen so far and the new ones"
            )
        return None
    shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
    if shape == (batch, 1, length, seen + length) and not is_tracing():
        found = read_pair_mask(attention_mask, seen, known)
        if found is not None:
            return None if found.all() else found
    if shape != (batch, seen + length):
        raise ValueError(
            f"attention_mask has shape {shape}; allowed is [{batch}, {seen + length}], 1 for real tokens and 0 for "
            "padding, or the same as causal attention per pair of tokens (the recurrence of KDA cannot follow another "
            "mask per pair)"
        )
    mask = attention_mask.to(torch.bool)
    if is_tracing():
        return mask[:, seen:]
    if attention_mask.dtype != torch.bool and not torch.equal(mask.to(attention_mask.dtype), attention_mask):
        raise ValueError("attention_mask contains other values than 0 and 1")
    agrees = mask[:, :seen].all() if known is None else torch.equal(mask[:, :seen], known.to(mask.device))
    if not agrees:
        raise ValueError(
            "attention_mask disagrees with the mask under which the cache was filled: the recurrence has skipped the "
            f"padding and holds the tokens of the first {seen} positions for good; allowed is the same mask, continued"
        )
    return None if mask[:, seen:].all() else mask[:, seen:]


def check_positions(position_ids: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Read positions that restart at 0 inside a row as packed documents; otherwise they are not used.

    K3 has no positional encoding: positions say only where documents begin.

    Args:
        position_ids: [T], [1, T] or [B, T]; anything at padding.
        padding: [B, T] bool, False at padding; None: no padding.

    Returns:
        Document numbers [1 or B, T], or None where each row is one document.

    Raises:
        ValueError: real tokens whose positions neither continue nor restart at 0.
    """
    if position_ids is None or position_ids.shape[-1] < 2 or position_ids.is_meta:
        return None
    position = position_ids.view(-1, position_ids.shape[-1])
    index = torch.arange(position.shape[-1], device=position.device)
    real = torch.ones_like(position, dtype=torch.bool) if padding is None else padding
    position = position.expand(real.shape)
    last = torch.where(real, index, -1).cummax(dim=1).values[:, :-1]
    step = position[:, 1:] - position.gather(1, last.clamp(min=0))
    continues = (step == 1) | (step == index[1:] - last) | (last < 0) | ~real[:, 1:]
    if is_tracing():
        # A graph cannot branch on values, but it can check them.
        torch._assert_async(continues.all(), "packed sequences cannot be compiled: position_ids are not consecutive")
        return None
    restarts = ~continues & (position[:, 1:] == 0)
    if not (continues | restarts).all():
        raise ValueError(
            "position_ids are not consecutive inside a row and do not restart at 0 either; allowed are consecutive "
            "positions, and packed sequences of which each begins at 0"
        )
    return torch.nn.functional.pad(restarts.cumsum(1), (1, 0)) if restarts.any() else None


def check_goes_on(position_ids: Tensor | None, padding: Tensor | None, cache: K3Cache) -> None:
    """Refuse with a ValueError positions that begin at 0 behind real tokens in the cache: another document."""
    if position_ids is None or not cache.get_seq_length() or position_ids.is_meta or is_tracing():
        return
    position = position_ids.view(-1, position_ids.shape[-1])
    real = torch.ones_like(position, dtype=torch.bool) if padding is None else padding
    first = position.expand(real.shape).gather(1, real.long().argmax(1, keepdim=True))[:, 0]
    begins = real.any(1) & (first == 0)
    if cache.real is not None:
        begins = begins & cache.real.any(1).to(begins.device)
    if begins.any():
        raise ValueError(
            f"position_ids begin at 0 again behind {cache.get_seq_length()} tokens in the cache: packed sequences "
            "cannot continue a cache; allowed are positions that go on, or a fresh K3Cache"
        )


def read_documents(
    position_ids: Tensor | None, padding: Tensor | None, batch: int, length: int, kwargs: dict
) -> Tensor | None:
    """Return document numbers [batch, length] if several documents are packed into a row, else None.

    Args:
        position_ids: see `check_positions`.
        kwargs: may hold `cu_seq_lens_q` and `cu_seq_lens_k` (equal, [N + 1], over the flattened batch) or `seq_idx`
            [batch, length]. What names documents must agree.

    Raises:
        ValueError: shapes or values that do not fit, or disagree.
    """
    found: dict[str, Tensor] = {}
    if position_ids is not None:
        shape = tuple(position_ids.shape)
        if shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(f"position_ids has shape {shape}; allowed is [{batch}, {length}], one for each new token")
        documents = check_positions(position_ids, padding)
        if documents is not None:
            found["position_ids"] = documents.expand(batch, length)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            found[name] = documents_from_lengths(kwargs[name], batch, length, name)
    if kwargs.get("seq_idx") is not None:
        if tuple(kwargs["seq_idx"].shape) != (batch, length):
            shape = tuple(kwargs["seq_idx"].shape)
            raise ValueError(f"seq_idx has shape {shape} (packed sequences); allowed is [{batch}, {length}]")
        found["seq_idx"] = kwargs["seq_idx"].long()
    if not found:
        return None
    borders = {name: documents.diff(dim=1) != 0 for name, documents in found.items()}
    first = next(iter(borders))
    for name in borders:
        if not torch.equal(borders[name], borders[first]):
            raise ValueError(f"{first} and {name} describe different packed sequences; allowed is one description")
    return found[first] if borders[first].any() else None
