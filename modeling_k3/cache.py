"""K3Cache: what a K3 model remembers between calls, one `cache_layers` object for each layer.

    KDA layer   state and convolution windows of constant size; with rollback an earlier state and the inputs since then
    MLA layer   latents that grow with the tokens

Nothing of AttnRes is cached: it runs over depth, within one token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from .cache_layers import NOT_LOGGED, K3LatentLayer, K3LinearLayer
from .configuration_k3 import K3Config


class K3Cache(DynamicCache):
    """The cache of a K3 model; `generate` makes one by itself.

    Any continuation from it equals a computation from scratch, or raises before anything has changed.

    Args:
        config: decides which layers are KDA and which are MLA.
        rollback_tokens: at least so many of the latest tokens can be taken back by `crop`. None: none, until
            `activate_past_recording`, which assisted decoding calls.
        rollback_bytes: the same, as a limit on what the logged inputs of one row may take in all layers, beside one
            more state for each KDA layer.

    Raises:
        ValueError: both windows, a window below 1, or bytes that do not suffice for one token.
    """

    #: Tokens that there is room for; None: it grows. See `static_cache`.
    max_cache_len: int | None = None

    def __init__(
        self, config: K3Config, *, rollback_tokens: int | None = None, rollback_bytes: int | None = None
    ) -> None:
        Cache.__init__(self, layers=[self._new_layer(kind == "linear_attention") for kind in config.layer_types])
        #: Set once padding went in: from then on a call without a mask over all positions would read padding.
        self.has_padding = False
        #: [B, seen] bool, False at padding; None where no call has told.
        self.real: Tensor | None = None
        #: [B, n] ids of the first n tokens, -1 where only embeddings were seen; None where nothing is known.
        self.ids: Tensor | None = None
        #: What `crop` has done so far.
        self.counters = {"rollbacks": 0, "rolled_back_tokens": 0}
        if rollback_tokens is not None and rollback_bytes is not None:
            raise ValueError("rollback_tokens and rollback_bytes are given; allowed is one of them")
        if rollback_bytes is not None:
            rollback_tokens = rollback_bytes // (2 * max(1, logged_bytes_per_token(config)))
        if rollback_tokens is not None:
            if rollback_tokens < 1:
                need = f"rollback_bytes of at least {2 * logged_bytes_per_token(config)}, or rollback_tokens above 0"
                raise ValueError(f"rollback of {rollback_tokens} tokens; allowed are {need}")
            self.keep_log(rollback_tokens)

    def _new_layer(self, is_linear: bool) -> K3LinearLayer | K3LatentLayer:
        return K3LinearLayer() if is_linear else K3LatentLayer()

    def linear_layer(self, layer_idx: int) -> K3LinearLayer:
        """The state of KDA layer `layer_idx`."""
        return self.layers[layer_idx]

    # -- what is in it ------------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included; also for a KDA layer, and for models without any MLA layer."""
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of a mask over everything seen and `query_length` new tokens."""
        return self.layers[layer_idx].get_mask_sizes(query_length)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a KDA layer, or None before the first token.

        Raises:
            ValueError: not a KDA layer, or tokens were taken back: the next call brings the state up again.
        """
        if any(is_linear and layer.is_behind for layer, is_linear in zip(self.layers, self.is_linear, strict=True)):
            raise ValueError("recurrent state: tokens were taken back; it exists again after the next forward")
        return super().get_recurrent_state(layer_idx, state_idx)

    @property
    def held_batch_size(self) -> int | None:
        """Rows in the cache, or None while it is empty."""
        return next((t.shape[0] for t in (layer.any_tensor() for layer in self.layers) if t is not None), None)

    def nbytes(self) -> dict[str, int]:
        """Bytes by kind: `latent`, `state`, `window`, `rollback`, `reserved` (room for latents to come), `total`."""
        sizes = dict.fromkeys(("latent", "state", "window", "rollback", "reserved"), 0)
        for layer, is_linear in zip(self.layers, self.is_linear, strict=True):
            if is_linear:
                sizes["state"] += 0 if layer.state is None else layer.state.nbytes
                sizes["window"] += sum(window.nbytes for window in layer.windows or [])
                sizes["rollback"] += 0 if layer.log is None else layer.log.nbytes()
            elif layer.get_seq_length():
                sizes["latent"] += layer.keys.nbytes + layer.values.nbytes
                sizes["reserved"] += layer.reserved_bytes()
        return {**sizes, "total": sum(sizes.values())}

    def note_padding(self, padding: Tensor | None, batch: int, count: int, device: torch.device) -> None:
        """Write down which of `count` tokens about to come are padding ([B, count] bool, False at padding; or None)."""
        if padding is None and not self.has_padding:
            return
        known = self.real
        if known is None:
            known = torch.ones(batch, self.get_seq_length(), dtype=torch.bool, device=device)
        new = torch.ones(batch, count, dtype=torch.bool, device=device) if padding is None else padding
        self.has_padding, self.real = True, torch.cat([known.to(device), new], dim=1)

    def note_ids(self, input_ids: Tensor | None, batch: int, count: int, device: torch.device) -> None:
        """Write down which `count` tokens are about to come, so that another prompt is not continued by mistake."""
        known = self.ids
        if (0 if known is None else known.shape[1]) != self.get_seq_length():
            return
        new = torch.full((batch, count), -1, device=device) if input_ids is None else input_ids.detach().clone()
        self.ids = new if known is None else torch.cat([known.to(device), new.to(known.dtype)], dim=1)

    def begins_like(self, ids: Tensor) -> bool:
        """Whether the tokens in the cache are, as far as known, the first ones of `ids` [B, T]."""
        if self.ids is None:
            return True
        count = min(self.ids.shape[1], ids.shape[1])
        known, given = self.ids[:, :count], ids[:, :count].to(self.ids.device)
        differs = (known != given) & (known >= 0)
        if self.real is not None:
            differs = differs & self.real[:, :count].to(differs.device)
        return not differs.any()

    # -- all or nothing -----------------------------------------------------------------------------------------

    def mark(self) -> list[dict[str, Any]]:
        """What `restore` needs to bring the cache back as it is now; no memory: tensors are replaced, never written to.

        A mark is good until `restore` or until the next call has succeeded.
        """
        marks = [{"has_padding": self.has_padding, "real": self.real, "ids": self.ids}]
        for layer in self.layers:
            held = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(layer).items()}
            if held.get("log") is not None:
                held["log"] = held["log"].copy()
            marks.append(held)
        return marks

    def restore(self, marks: list[dict[str, Any]]) -> None:
        """Bring the cache back to a mark: a call that failed half-way has then not happened."""
        for name, value in marks[0].items():
            setattr(self, name, value)
        for layer, held in zip(self.layers, marks[1:], strict=True):
            vars(layer).clear()
            vars(layer).update(held)

    # -- rollback -----------------------------------------------------------------------------------------------

    def keep_log(self, window: int) -> None:
        """From now on keep what it takes to give `window` tokens back. A wider window than asked for stays."""
        for layer, is_linear in zip(self.layers, self.is_linear, strict=True):
            if is_linear:
                layer.keep_log(window)

    @property
    def rollback_limit(self) -> int:
        """Tokens that `crop` can take back now."""
        limits = [layer.rollback_limit for layer, linear in zip(self.layers, self.is_linear, strict=True) if linear]
        return min([*limits, self.get_seq_length()])

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back, in every layer or in none.

        Args:
            tokens_to_remove: 0 or negative, as everywhere in the library.

        Raises:
            ValueError: positive, or more tokens than `rollback_limit`; nothing has changed then.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.rollback_limit:
            raise ValueError(
                f"crop({tokens_to_remove}) cannot be honoured: allowed are {-self.rollback_limit} to 0, how many of "
                f"the {self.get_seq_length()} tokens to remove; {NOT_LOGGED}"
            )
        if tokens_to_remove:
            for layer in self.layers:
                layer.crop(tokens_to_remove)
            seen = self.get_seq_length()
            if seen:
                self._map_known(lambda x: x[:, :seen])
            else:
                # Nothing is left, not even the number of rows.
                self.reset()
            self.counters["rollbacks"] += 1
            self.counters["rolled_back_tokens"] -= tokens_to_remove

    # -- every tensor -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything, keep the object and its rollback window."""
        super().reset()
        self.has_padding, self.real, self.ids = False, None, None

    def to(self, device: torch.device | str) -> "K3Cache":
        """Move every tensor to `device`; returns the cache."""
        for layer in self.layers:
            layer.map_tensors(lambda x: x.to(device))
            if getattr(layer, "device", None) is not None:
                layer.device = torch.device(device)
        self._map_known(lambda x: x.to(device))
        return self

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the rows `beam_idx`, in this order."""
        super().reorder_cache(beam_idx)
        self._map_known(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (numbers or a mask)."""
        super().batch_select_indices(indices)
        self._map_known(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._map_known(lambda x: x.repeat_interleave(repeats, dim=0))

    def reserve(self, num_tokens: int) -> None:
        """Make room for this many tokens in all, so that a prefill in pieces does not copy what it has."""
        for layer, is_linear in zip(self.layers, self.is_linear, strict=True):
            if not is_linear:
                layer.reserve(num_tokens)

    def _map_known(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace what is known of the tokens by `fn` of it."""
        self.ids = None if self.ids is None else fn(self.ids)
        if self.real is not None:
            self.real = fn(self.real)
            if self.real.all():
                # The padding went away with a row or with the last tokens.
                self.has_padding, self.real = False, None


def logged_bytes_per_token(config: K3Config) -> int:
    """Bytes that the rollback log takes for one token of one row, in all KDA layers."""
    heads, width = config.kda_num_heads, config.kda_head_dim
    itemsize = (config.dtype or torch.float32).itemsize
    return config.layer_types.count("linear_attention") * (3 * heads * width + width + heads) * itemsize
