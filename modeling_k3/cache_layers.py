"""What one layer of a K3 model remembers between calls; `cache` holds one for each.

KDA layer   recurrent state [B, H, K, V] in at least float32, three convolution windows [B, H * K, W]:
            constant size; with rollback also an earlier state and the inputs since then (`rollback`)
MLA layer   normalised latent [B, 1, S, kv_lora_rank] (`keys`) and shared key part [B, 1, S, rope] (`values`):
            grows with S, and is about 50 times smaller than expanded keys and values
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from .rollback import Advance, KDAInputs, RollbackLog

#: Streams with a short convolution of their own: query, key, value.
NUM_WINDOWS = 3
#: Tokens that can be taken back where assisted decoding asks for it without saying how many.
DEFAULT_ROLLBACK = 32
NOT_LOGGED = (
    "the recurrent state of a KDA layer holds every token it has seen; prefill the shorter prompt into a fresh K3Cache,"
    " or make it with K3Cache(config, rollback_tokens=n), which keeps what it takes to give n tokens back"
)


class BatchRows:
    """Choosing among the rows of a batch, for a layer whose `map_tensors` replaces all it holds."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the rows `beam_idx`, in this order."""
        self.map_tensors(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (numbers or a mask)."""
        self.map_tensors(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.map_tensors(lambda x: x.repeat_interleave(repeats, dim=0))


class K3LinearLayer(BatchRows, LinearAttentionCacheLayerMixin):
    """State of one KDA layer. Tensors are replaced, never written to, so that copies of a cache stay independent."""

    is_compileable = False

    def __init__(self) -> None:
        super().__init__(number_of_states=NUM_WINDOWS)
        # As the length of an empty tensor: a compiled graph has a symbol for it, where it would be built for one int.
        self._seen = torch.empty(0, 0)
        self.log: RollbackLog | None = None

    def lazy_initialization(
        self, conv_states: Tensor | None = None, recurrent_states: Tensor | None = None, state_idx: int = 0
    ) -> None:
        """Nothing to prepare: the first `remember` brings the tensors."""

    def run(self, inputs: KDAInputs, advance: Advance) -> Tensor:
        """Run a KDA layer over new tokens from where this memory stands, and remember where it ends.

        Args:
            inputs: the new tokens.
            advance: the layer.

        Returns:
            o [B, T, H, V] of the new tokens.
        """
        if self.log is not None and inputs.mask is not None:
            # Logged masks are read again later: they must not be views of what the caller may write to.
            inputs = inputs._replace(mask=inputs.mask.clone())
        run = advance if self.log is None else lambda *begin: self.log.run(*begin, advance)
        o, windows, state = run(inputs, self.windows, None if self.is_behind else self.state)
        self.remember(windows, state, inputs.num_tokens)
        return o

    def remember(self, windows: Sequence[Tensor], state: Tensor, num_tokens: int) -> None:
        """Replace windows and state after `num_tokens` more tokens (padding included)."""
        for index, window in enumerate(windows):
            self.update_conv_state(window, index)
        self.update_recurrent_state(state)
        self._advance_count(num_tokens)

    def _advance_count(self, num_tokens: int) -> None:
        self._seen = self._seen.new_empty(self.seen_tokens + num_tokens, 0)

    def start_from(self, windows: Sequence[Tensor], state: Tensor, num_tokens: int) -> None:
        """Stand where another memory stood after its first `num_tokens` tokens; nothing before can be taken back."""
        self.remember(windows, state, num_tokens)
        if self.log is not None:
            self.log = RollbackLog(self.log.window, self.windows, self.state)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Replace one window by its successor [B, H * K, W]."""
        self.conv_states[state_idx] = conv_states
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        self.dtype, self.device = conv_states.dtype, conv_states.device
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Replace the recurrent state by its successor [B, H, K, V]."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    @property
    def seen_tokens(self) -> int:
        """Tokens seen, padding included."""
        return self._seen.shape[0]

    @property
    def is_behind(self) -> bool:
        """Whether tokens were taken back since the last call: the next call brings the state up again."""
        return self.log is not None and self.log.is_behind

    @property
    def windows(self) -> list[Tensor] | None:
        """The three windows, or None before the first token and while tokens are taken back."""
        return [self.conv_states[i] for i in range(NUM_WINDOWS)] if self.has_previous_state[0] else None

    @property
    def state(self) -> Tensor | None:
        """The recurrent state, or None before the first token and while tokens are taken back."""
        return self.recurrent_states[0] if self.has_previous_state[0] else None

    def any_tensor(self) -> Tensor | None:
        """Some tensor with the layer's batch and device, or None if nothing is held."""
        if not self.is_behind:
            return self.state
        return self.log.pieces[0].q if self.log.pieces else self.log.state

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over everything seen and `query_length` new tokens."""
        return self.seen_tokens + query_length, 0

    def reset(self) -> None:
        """Forget everything but how many tokens may be taken back."""
        window = None if self.log is None else self.log.window
        self.__init__()
        if window is not None:
            self.keep_log(window)

    # -- rollback -----------------------------------------------------------------------------------------------

    def keep_log(self, window: int) -> None:
        """From now on keep what it takes to give `window` tokens back; a log that is kept already only grows."""
        if self.log is None:
            self.log = RollbackLog(window, self.windows, self.state)
        self.log.window = max(self.log.window, window)
        self.record_past = True

    def activate_past_recording(self) -> None:
        """Keep a log of the default length, unless one is kept already."""
        if self.log is None:
            self.keep_log(DEFAULT_ROLLBACK)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back at all; `rollback_limit` says how many."""
        return self.log is not None

    @property
    def rollback_limit(self) -> int:
        """Tokens that can be taken back now."""
        return 0 if self.log is None else self.log.num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back; `K3Cache.crop` has checked that this is possible."""
        count = -tokens_to_remove
        if count < 0 or count > self.rollback_limit:
            raise ValueError(f"crop({tokens_to_remove}) is not possible here: {NOT_LOGGED}")
        if count:
            self.log.crop(count)
            self._advance_count(-count)
            for states in (self.conv_states, self.recurrent_states):
                states.update(dict.fromkeys(states))
            for flags in (
                self.has_previous_state,
                self.is_conv_states_initialized,
                self.is_recurrent_states_initialized,
            ):
                flags.update(dict.fromkeys(flags, False))

    # -- every tensor -------------------------------------------------------------------------------------------

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor, the log's too, by `fn` of it."""
        if self.has_previous_state[0]:
            self.conv_states = {i: fn(window) for i, window in self.conv_states.items()}
            self.recurrent_states = {i: None if s is None else fn(s) for i, s in self.recurrent_states.items()}
        if self.log is not None:
            self.log.map(fn)

    def offload(self) -> None:
        """Move everything to the CPU."""
        self.map_tensors(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back to the device where it was computed."""
        if self.device is not None:
            self.map_tensors(lambda x: x.to(self.device, non_blocking=True))


class K3LatentLayer(DynamicLayer):
    """Latents of one MLA layer. They grow inside a reserve, so that a decode step does not copy the history.

    `keys` and `values` are views of the beginning of the reserve. Only what lies behind them is ever written to: views
    that were handed out keep their values, and any other change (crop, batch operations) leaves the reserve behind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reserve: tuple[Tensor, Tensor] | None = None
        self._filled: Tensor | None = None
        self._capacity = 0

    def reserve(self, num_tokens: int) -> None:
        """Make room for this many tokens in all when the next ones come."""
        self._capacity = max(self._capacity, num_tokens)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append latents [B, 1, T, kv_lora_rank] and shared parts [B, 1, T, rope]; return all of both."""
        seen = self.get_seq_length()
        # Autograd needs tensors that stay as they are, and a first call without a reserve keeps exactly what it brings.
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not (seen or self._capacity):
            return super().update(key_states, value_states)
        if not seen:
            self.lazy_initialization(key_states, value_states)
        parts, length = (key_states, value_states), seen + key_states.shape[-2]
        if not self._fits(length, key_states):
            # Room that was asked for beyond these tokens is enough; a budget may depend on it.
            capacity = self._capacity if self._capacity > length else length + length // 8 + 64
            reserve = tuple(x.new_empty(*x.shape[:2], capacity, x.shape[-1]) for x in parts)
            if seen:
                reserve[0][:, :, :seen], reserve[1][:, :, :seen] = self.keys, self.values
            self._reserve = reserve
        for reserve, part in zip(self._reserve, parts, strict=True):
            reserve[:, :, seen:length] = part
        self.keys, self.values = (reserve[:, :, :length] for reserve in self._reserve)
        self._filled = self.keys
        return self.keys, self.values

    def _fits(self, length: int, like: Tensor) -> bool:
        """Whether the reserve continues `keys`, has room, and may be written to."""
        if self._reserve is None or self._filled is not self.keys or self._reserve[0].shape[-2] < length:
            return False
        reserve = self._reserve[0]
        writable = torch.is_inference_mode_enabled() or not reserve.is_inference()
        return writable and reserve.dtype == like.dtype and reserve.device == like.device

    def reserved_bytes(self) -> int:
        """Bytes behind what is filled: the reserve, and what a crop has left until the next token comes."""
        if not self.get_seq_length() or self.keys.is_meta:
            return 0
        held = [x.untyped_storage() for x in (self.keys, self.values, *(self._reserve or ()))]
        storages = {storage.data_ptr(): storage.nbytes() for storage in held}
        return sum(storages.values()) - self.keys.nbytes - self.values.nbytes

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: no reserve, and of the latents only what is filled."""
        state = {**vars(self), "_reserve": None, "_filled": None}
        if self.get_seq_length():
            state["keys"], state["values"] = self.keys.clone(), self.values.clone()
        return state

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back; a large crop gives their memory back too."""
        super().crop(tokens_to_remove)
        if tokens_to_remove:
            self._reserve = self._filled = None
            if self.get_seq_length() and self.reserved_bytes() > self.keys.nbytes + self.values.nbytes:
                self.keys, self.values = self.keys.clone(), self.values.clone()

    def any_tensor(self) -> Tensor | None:
        """Some tensor with the layer's batch and device, or None if nothing is held."""
        return self.keys if self.get_seq_length() else None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._reserve = self._filled = None

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace both tensors by `fn` of them."""
        if self.get_seq_length():
            self.keys, self.values = fn(self.keys), fn(self.values)
        self._reserve = self._filled = None

    def offload(self) -> None:
        """Move everything to the CPU."""
        self.map_tensors(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back to the device where it was computed."""
        if self.is_initialized:
            self.map_tensors(lambda x: x.to(self.device, non_blocking=True))
