"""K3StaticCache: a K3Cache of fixed shapes, so that a compiled decode step is one graph for every token.

    KDA layer   state and windows have one size anyway; a graph writes them in place
    MLA layer   latents in buffers [B, 1, N, .] of `max_cache_len` = N tokens, written at the position

How many tokens there are is kept twice: as a number, for Python, and as a tensor, for graphs, which would be built
again for every value of a number. Outside graphs attention reads the filled part, inside them the whole buffer under a
mask.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import K3Cache
from .cache_layers import BatchRows, K3LatentLayer, K3LinearLayer
from .configuration_k3 import K3Config


def _owned(x: Tensor) -> Tensor:
    """A tensor that may be written to in every mode, at an address that a graph may rely on."""
    if torch.compiler.is_compiling():
        return x
    with torch.inference_mode(False), torch.no_grad():
        x = x.clone() if x.is_inference() else x
    torch._dynamo.mark_static_address(x)
    return x


class _Counted:
    """The number of tokens that a layer has seen, for Python and for graphs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_count(0, "cpu")

    def _set_count(self, count: int, device: torch.device | str) -> None:
        self._count: int | None = count
        with torch.inference_mode(False):
            self.position = torch.full((), count, dtype=torch.long, device=device)
        torch._dynamo.mark_static_address(self.position)

    def _count_on(self, num_tokens: int, device: torch.device) -> None:
        if torch.compiler.is_compiling():
            # The number is read from the tensor once somebody asks for it.
            self._count = None
            if self.position.device == device:
                self.position.add_(num_tokens)
            else:
                self.position = self.position.to(device) + num_tokens
        else:
            self._set_count(self.get_seq_length() + num_tokens, device)

    def get_seq_length(self) -> int:
        """Tokens seen, padding included; a tensor of no dimension inside a graph."""
        if torch.compiler.is_compiling():
            return self.position
        if self._count is None:
            self._count = int(self.position)
        return self._count


class K3StaticLinearLayer(_Counted, K3LinearLayer):
    """State of one KDA layer, written in place by graphs and replaced elsewhere."""

    @property
    def is_compileable(self) -> bool:
        """Whether a graph can update it: not while inputs are logged for a rollback."""
        return self.log is None

    @property
    def seen_tokens(self) -> int:
        """Tokens seen, padding included."""
        return self.get_seq_length()

    def _advance_count(self, num_tokens: int) -> None:
        self._count_on(num_tokens, self.device)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Replace one window by its successor [B, H * K, W]."""
        return super().update_conv_state(self._put(self.conv_states[state_idx], conv_states), state_idx)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Replace the recurrent state by its successor [B, H, K, V]."""
        return super().update_recurrent_state(self._put(self.recurrent_states[state_idx], recurrent_states), state_idx)

    @staticmethod
    def _put(held: Tensor | None, new: Tensor) -> Tensor:
        if held is None or not torch.compiler.is_compiling() or held.shape != new.shape or held.dtype != new.dtype:
            return _owned(new)
        return held.copy_(new)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor, the log's too, by `fn` of it."""
        super().map_tensors(lambda x: _owned(fn(x)))


class K3StaticLatentLayer(_Counted, BatchRows, K3LatentLayer):
    """Latents of one MLA layer in two buffers, made when the first token comes and kept by `reset`.

    `keys` and `values` are what is filled. Only what lies behind it is ever written to, so that a call that failed is
    undone by the number of tokens alone.
    """

    is_compileable = True

    def __init__(self, max_cache_len: int) -> None:
        self.buffers: tuple[Tensor, Tensor] | None = None
        super().__init__()
        self.max_cache_len = max_cache_len

    def _view(self, index: int) -> Tensor | None:
        return None if self.buffers is None else self.buffers[index][:, :, : self.get_seq_length()]

    # The base class keeps what is filled in attributes, and clears them at its start.
    keys = property(lambda self: self._view(0), lambda self, value: None)
    values = property(lambda self: self._view(1), lambda self, value: None)

    def get_max_length(self) -> int:
        """Tokens that there is room for in all."""
        return self.max_cache_len

    def reserve(self, num_tokens: int) -> None:
        """Nothing to do: the room is there."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers, unless those of an earlier sequence fit."""
        self.device, self.dtype = key_states.device, key_states.dtype
        held = self.buffers
        parts = (key_states, value_states)
        if held is None or not all(_alike(x, y) for x, y in zip(held, parts, strict=True)):
            shapes = [(*x.shape[:2], self.max_cache_len, x.shape[-1]) for x in parts]
            if torch.compiler.is_compiling():
                self.buffers = tuple(x.new_zeros(shape) for x, shape in zip(parts, shapes, strict=True))
            else:
                with torch.inference_mode(False):
                    made = [torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes]
                self.buffers = tuple(_owned(x) for x in made)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write latents [B, 1, T, kv_lora_rank] and shared parts [B, 1, T, rope] behind what is filled.

        Returns:
            What is filled of both; inside a graph both buffers.

        Raises:
            ValueError: no room for so many tokens; or latents that want a gradient, which in-place writes would lose.
        """
        parts, count = (key_states, value_states), key_states.shape[-2]
        if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
            raise ValueError("a static cache keeps no gradients; allowed is torch.no_grad() around it, or a K3Cache")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.compiler.is_compiling():
            at = self.position.to(self.device) + torch.arange(count, device=self.device)
            for buffer, part in zip(self.buffers, parts, strict=True):
                buffer.index_copy_(2, at, part)
            self._count_on(count, self.device)
            return self.buffers
        seen = self.get_seq_length()
        check_room(seen, count, self.max_cache_len)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[:, :, seen : seen + count] = part
        self._count_on(count, self.device)
        return self.keys, self.values

    def reserved_bytes(self) -> int:
        """Bytes behind what is filled."""
        if self.buffers is None:
            return 0
        return sum(x.nbytes for x in self.buffers) - self.keys.nbytes - self.values.nbytes

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: buffers of their own."""
        state = {**vars(self), "position": self.position.clone()}
        state["buffers"] = None if self.buffers is None else tuple(x.clone() for x in self.buffers)
        return state

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back; `K3Cache.crop` has checked that this is possible."""
        if tokens_to_remove:
            self._count_on(tokens_to_remove, self.device)

    def any_tensor(self) -> Tensor | None:
        """Some tensor with the layer's batch and device, or None if nothing is held."""
        return self.buffers[0] if self.is_initialized else None

    def reset(self) -> None:
        """Forget everything but the buffers."""
        self.is_initialized = False
        self._set_count(0, self.position.device)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace both buffers by `fn` of them."""
        if self.is_initialized:
            self.buffers = tuple(_owned(fn(x)) for x in self.buffers)
            self._set_count(self.get_seq_length(), self.buffers[0].device)
        else:
            self.buffers = None


class K3StaticCache(K3Cache):
    """A K3Cache with room for so many tokens and no more; `generate(cache_implementation="static")` makes one.

    Computes what a K3Cache computes. With `torch.compile` a decode step is one graph of fixed shapes.

    Args:
        config: decides which layers are KDA and which are MLA.
        max_cache_len: N, tokens that there is room for, padding included.
        rollback_tokens, rollback_bytes: see `K3Cache`; a cache that can take tokens back is not compiled by `generate`.

    Raises:
        ValueError: `max_cache_len` below 1; see also `K3Cache`.
    """

    def __init__(self, config: K3Config, max_cache_len: int, **rollback: int | None) -> None:
        if not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise ValueError(f"max_cache_len={max_cache_len!r}; allowed are whole numbers above 0")
        self.max_cache_len = max_cache_len
        #: [B, N] bool, False at padding, True at what is still to come; None where no call has told.
        self._real: Tensor | None = None
        super().__init__(config, **rollback)

    def _new_layer(self, is_linear: bool) -> K3LinearLayer | K3LatentLayer:
        return K3StaticLinearLayer() if is_linear else K3StaticLatentLayer(self.max_cache_len)

    @property
    def real(self) -> Tensor | None:
        """[B, seen] bool, False at padding; None where no call has told."""
        return None if self._real is None else self._real[:, : self.get_seq_length()]

    @real.setter
    def real(self, known: Tensor | None) -> None:
        self._real = None if known is None else F.pad(known, (0, self.max_cache_len - known.shape[1]), value=True)

    @property
    def position(self) -> Tensor:
        """Tokens seen as a tensor of no dimension, for graphs."""
        return self.layers[0].position

    def check_room(self, num_tokens: int) -> None:
        """Refuse with a ValueError more tokens than there is room for."""
        check_room(self.get_seq_length(), num_tokens, self.max_cache_len)

    def note_padding(self, padding: Tensor | None, batch: int, count: int, device: torch.device) -> None:
        """Write down which of `count` tokens about to come are padding ([B, count] bool, False at padding; or None)."""
        if not torch.compiler.is_compiling():
            return super().note_padding(padding, batch, count, device)
        if padding is not None:
            known = self._real
            if known is None:
                known = torch.ones(batch, self.max_cache_len, dtype=torch.bool, device=device)
            at = self.position.to(device) + torch.arange(count, device=device)
            self.has_padding, self._real = True, known.index_copy(1, at, padding)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Tokens that there is room for in all."""
        return self.max_cache_len


def check_room(seen: int, num_tokens: int, max_cache_len: int) -> None:
    """Refuse with a ValueError more tokens than there is room for."""
    if seen + num_tokens > max_cache_len:
        raise ValueError(
            f"the static cache has max_cache_len={max_cache_len} and holds {seen} tokens; allowed are "
            f"{max_cache_len - seen} new ones, not {num_tokens}: make it longer, or use a K3Cache, which grows"
        )


def _alike(buffer: Tensor, part: Tensor) -> bool:
    """Whether a buffer of an earlier sequence can take these tokens."""
    same = buffer.shape[:2] == part.shape[:2] and buffer.shape[-1] == part.shape[-1]
    return same and buffer.dtype == part.dtype and buffer.device == part.device
