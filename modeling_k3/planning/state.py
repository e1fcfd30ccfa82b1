"""What a model remembers between calls: KDA states, convolution windows, MLA latents, rollback logs, prefix blocks."""

from dataclasses import dataclass

from modeling_k3.planning.shape import Shape

#: KDA streams with a window of their own: query, key, value.
_WINDOWS = 3


@dataclass(frozen=True)
class StateSizes:
    """Sizes of the parts of a K3Cache; all but `latent_per_token` and `block` are for the whole batch.

    Args:
        state, window: KDA, constant.
        latent_per_token: MLA, one token of the whole batch.
        rollback_base: a second state and windows for each KDA layer, where tokens can be taken back.
        rollback_per_token: logged inputs of one token of the whole batch.
    """

    state: int
    window: int
    latent_per_token: int
    rollback_base: int
    rollback_per_token: int

    def rollback(self, tokens: int) -> int:
        """Bytes of a log with which `tokens` can be taken back: it grows to twice the window."""
        return self.rollback_base + 2 * tokens * self.rollback_per_token if tokens else 0

    def reserved(self, tokens: int) -> int:
        """Most that the latents' reserve holds beyond `tokens` of them (`K3LatentLayer.update`)."""
        return (tokens // 8 + 64) * self.latent_per_token


def state_sizes(shape: Shape, batch: int, item: int) -> StateSizes:
    """Sizes of a cache, as `K3Cache.nbytes()` counts them.

    Args:
        batch: rows.
        item: bytes per number of the activations; states are held in at least float32.
    """
    width = shape.kda_width
    state = shape.num_kda * batch * shape.heads * shape.key**2 * max(item, 4)
    window = shape.num_kda * batch * _WINDOWS * width * shape.taps * item
    logged = 3 * width + shape.key + shape.heads
    return StateSizes(
        state=state,
        window=window,
        latent_per_token=shape.num_mla * batch * (shape.rank + shape.rope) * item,
        rollback_base=state + window,
        rollback_per_token=shape.num_kda * batch * logged * item,
    )


def prefix_block_bytes(shape: Shape, block_size: int, item: int) -> int:
    """Bytes of one block of a `PrefixCache`: its tokens, their latents, and a snapshot of every KDA layer."""
    one = state_sizes(shape, 1, item)
    return 8 * block_size + block_size * one.latent_per_token + one.state + one.window
