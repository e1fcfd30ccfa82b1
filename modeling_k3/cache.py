"""K3Cache: what a K3 model remembers between calls.

    KDA layer   recurrent state [B, H, K, V] in at least float32, three convolution windows [B, H * K, W]:
                constant size
    MLA layer   normalised latent [B, 1, S, kv_lora_rank] (`keys`) and shared key part [B, 1, S, rope] (`values`):
                grows with S, and is about 50 times smaller than expanded keys and values

Nothing of AttnRes is cached: it runs over depth, within one token.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from .configuration_k3 import K3Config

#: Streams with a short convolution of their own: query, key, value.
NUM_WINDOWS = 3


class K3LinearLayer(LinearAttentionCacheLayerMixin):
    """State of one KDA layer. Tensors are replaced, never written to, so that copies of a cache stay independent."""

    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__(number_of_states=NUM_WINDOWS)
        self.seen_tokens = 0

    def lazy_initialization(
        self, conv_states: Tensor | None = None, recurrent_states: Tensor | None = None, state_idx: int = 0
    ) -> None:
        """Nothing to prepare: the first `remember` brings the tensors."""

    def remember(self, windows: Sequence[Tensor], state: Tensor, num_tokens: int) -> None:
        """Replace windows and state after `num_tokens` more tokens (padding included)."""
        for index, window in enumerate(windows):
            self.update_conv_state(window, index)
        self.update_recurrent_state(state)
        self.seen_tokens += num_tokens

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
    def windows(self) -> list[Tensor] | None:
        """The three windows, or None before the first token."""
        return [self.conv_states[i] for i in range(NUM_WINDOWS)] if self.has_previous_state[0] else None

    @property
    def state(self) -> Tensor | None:
        """The recurrent state, or None before the first token."""
        return self.recurrent_states[0] if self.has_previous_state[0] else None

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over everything seen and `query_length` new tokens."""
        return self.seen_tokens + query_length, 0

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.__init__()

    def _map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self.has_previous_state[0]:
            self.conv_states = {i: fn(window) for i, window in self.conv_states.items()}
            self.recurrent_states[0] = fn(self.recurrent_states[0])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the rows `beam_idx`, in this order."""
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (numbers or a mask)."""
        self._map_batch(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._map_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: see `K3Cache.crop`."""
        raise ValueError(_no_crop(tokens_to_remove))


class K3Cache(DynamicCache):
    """The cache of a K3 model; `generate` makes one by itself.

    Args:
        config: decides which layers are KDA and which are MLA.

    Not yet honoured, and refused: removing tokens (`crop`), hence assisted decoding; offloading.
    """

    def __init__(self, config: K3Config) -> None:
        layers = [K3LinearLayer() if kind == "linear_attention" else DynamicLayer() for kind in config.layer_types]
        Cache.__init__(self, layers=layers)
        #: Set once padding went in: from then on a call without a mask over all positions would read padding.
        self.has_padding = False

    def linear_layer(self, layer_idx: int) -> K3LinearLayer:
        """The state of KDA layer `layer_idx`."""
        return self.layers[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included; also for a KDA layer, and for models without any MLA layer."""
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    @property
    def held_batch_size(self) -> int | None:
        """Rows in the cache, or None while it is empty."""
        for layer, is_linear in zip(self.layers, self.is_linear, strict=True):
            tensor = layer.state if is_linear else layer.keys
            if tensor is not None and tensor.numel():
                return tensor.shape[0]
        return None

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of a mask over everything seen and `query_length` new tokens."""
        return self.layers[layer_idx].get_mask_sizes(query_length)

    def reset(self) -> None:
        """Forget everything, keep the object."""
        super().reset()
        self.has_padding = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end. Refused before anything changes if there is a KDA layer.

        Raises:
            ValueError: a KDA state cannot be taken back without a snapshot.
        """
        if tokens_to_remove and any(self.is_linear) and self.get_seq_length():
            raise ValueError(_no_crop(tokens_to_remove))
        for layer, is_linear in zip(self.layers, self.is_linear, strict=True):
            if not is_linear:
                layer.crop(tokens_to_remove)


def _no_crop(tokens_to_remove: int) -> str:
    return (
        f"crop({tokens_to_remove}) cannot be honoured: the recurrent state of a KDA layer holds every token it has "
        "seen and cannot give one back; prefill the shorter prompt into a fresh K3Cache instead"
    )
