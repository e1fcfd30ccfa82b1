"""KDA as attention: the precise form, block by block, with the weights it amounts to.

The recurrence is a linear map from values to outputs. With D_ij the decay between tokens j and i, i >= j, per channel:

    L_ij = beta_i sum_d k_id D_ijd k_jd    (j < i)          A_ij = K^-1/2 sum_d q_id D_ijd k_jd    (j <= i)
    o    = A (I + L)^-1 Diag(beta) v  =  W v                W: the effective attention weights, [T, T] per head

"Exact" means: KDA approximates nothing, so nothing but rounding separates this from the definition, and here rounding
is kept out of the way (`kda_ops.exact_kda` computes in float64 and rounds once; log decays are always summed in it, and
every exponent is a difference that is never positive). How large rounding is in a faster form is what this form is
there to measure. A model's own precise retrieval, in contrast, is its full-attention layers.

Time grows with T^2. Memory does not, unless the weights or gradients are asked for: a block of rows meets one block
of earlier tokens at a time. One head of 32,768 tokens, K = V = 128, took 390 MiB and some 20 seconds of one core, where
its weights would take 8 GiB (`benchmarks/kda.py --contenders exact`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

#: Rows and columns formed at a time.
BLOCK = 256
#: Inside a block, a pair of tokens in one tile is decayed by its own difference.
TILE = 16
#: Weights beyond this are refused: nobody looks at them, and they fill the memory.
MAX_WEIGHT_BYTES = 2**31


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *, output_weights: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Evaluate KDA in its attention form. Tensors of one dtype, float32 or float64, as in `kda_ops`.

    Returns:
        o [B, T, H, V], the final state [B, H, K, V], and W [B, H, T, T] if `output_weights` (what the state that
        entered adds to o is not part of W).

    Raises:
        ValueError: weights larger than 2 GiB were asked for.
    """
    if output_weights:
        _check_size(q)
    length = q.shape[1]
    q = q * q.shape[-1] ** -0.5
    q, k, v, log_decay, beta = (x.transpose(1, 2) for x in (q, k, v, log_decay, beta.unsqueeze(-1)))
    cum = log_decay.double().cumsum(dim=-2)
    pairs = torch.stack([beta * k, q], dim=2)  # [B, H, 2, T, K]: writers and readers
    pseudo: list[Tensor] = []
    outputs: list[Tensor] = []
    scores: list[Tensor] = []
    for start in range(0, length, BLOCK):
        rows = slice(start, min(start + BLOCK, length))
        earlier = cum[:, :, rows].exp().to(q.dtype)
        seen = (earlier.unsqueeze(2) * pairs[:, :, :, rows]) @ state.unsqueeze(2)
        met: list[Tensor] = []
        for column, past in zip(range(0, start, BLOCK), pseudo, strict=True):
            block = _far(pairs, k, cum, rows, slice(column, column + BLOCK))
            seen = seen + _placed(block, past)
            if output_weights:
                met.append(block)
        w, o, own = _inside(beta[:, :, rows] * v[:, :, rows], seen, pairs, k, cum, rows)
        pseudo.append(w)
        outputs.append(o)
        if output_weights:
            scores.append(torch.nn.functional.pad(torch.cat([*met, own], dim=-1), (0, length - rows.stop)))
    if not outputs:
        empty = q.new_zeros(*q.shape[:2], 0, 0) if output_weights else None
        return v.transpose(1, 2), state.clone(), empty
    final = cum[..., -1, :, None].exp().to(k.dtype) * state
    for start, w in zip(range(0, length, BLOCK), pseudo, strict=True):
        rows = slice(start, min(start + BLOCK, length))
        final = final + (k[:, :, rows] * (cum[:, :, -1:] - cum[:, :, rows]).exp().to(k.dtype)).mT @ w
    weights = _weights(torch.cat(scores, dim=-2), beta) if output_weights else None
    return torch.cat(outputs, dim=-2).transpose(1, 2), final, weights


def _check_size(q: Tensor) -> None:
    batch, length, heads, _ = q.shape
    needed = batch * heads * length * length * q.element_size()
    if needed > MAX_WEIGHT_BYTES:
        raise ValueError(
            f"weights of {length} tokens, {heads} heads and a batch of {batch} take {needed} bytes; allowed are "
            f"{MAX_WEIGHT_BYTES}"
        )


def _placed(scores: Tensor, values: Tensor) -> Tensor:
    """Scores [B, H, 2, i, j] on values [B, H, j, V] -> [B, H, 2, i, V]."""
    return scores @ values.unsqueeze(2)


def _far(pairs: Tensor, k: Tensor, cum: Tensor, rows: slice, columns: slice) -> Tensor:
    """Scores [B, H, 2, rows, columns] where all columns come before all rows, decayed by way of the first row."""
    border = cum[:, :, rows.start - 1 : rows.start]
    left = pairs[:, :, :, rows] * (cum[:, :, rows] - border).exp().to(k.dtype).unsqueeze(2)
    right = k[:, :, columns] * (border - cum[:, :, columns]).exp().to(k.dtype)
    return left @ right.mT.unsqueeze(2)


def _near(pairs: Tensor, k: Tensor, cum: Tensor, rows: slice) -> Tensor:
    """Scores [B, H, 2, rows, rows] inside a tile, pair by pair: writers below the diagonal, readers on it too."""
    own = cum[:, :, rows]
    count = own.shape[-2]
    above = torch.ones(count, count, dtype=torch.bool, device=k.device).triu(1)
    gap = (own.unsqueeze(-2) - own.unsqueeze(-3)).masked_fill(above.unsqueeze(-1), float("-inf"))
    decayed = gap.exp().to(k.dtype) * k[:, :, rows].unsqueeze(-3)
    both = torch.einsum("bhcid,bhijd->bhcij", pairs[:, :, :, rows], decayed)
    return torch.stack([both[:, :, 0].tril(-1), both[:, :, 1]], dim=2)


def _tiles(rows: slice) -> Iterator[slice]:
    for start in range(rows.start, rows.stop, TILE):
        yield slice(start, min(start + TILE, rows.stop))


def _inside(
    bv: Tensor, seen: Tensor, pairs: Tensor, k: Tensor, cum: Tensor, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve a block.

    Args:
        bv: beta v [B, H, rows, V].
        seen: [B, H, 2, rows, V], what writers and readers see of everything before the block.

    Returns:
        Pseudo-values and outputs [B, H, rows, V], and the scores inside the block [B, H, 2, rows, rows].
    """
    pseudo: list[Tensor] = []
    outputs: list[Tensor] = []
    scores: list[Tensor] = []
    for tile in _tiles(rows):
        at = slice(tile.start - rows.start, tile.stop - rows.start)
        known, near = seen[:, :, :, at], _near(pairs, k, cum, tile)
        if pseudo:
            far = _far(pairs, k, cum, tile, slice(rows.start, tile.start))
            known = known + _placed(far, torch.cat(pseudo, dim=-2))
        r = bv[:, :, at] - known[:, :, 0]
        w = torch.linalg.solve_triangular(near[:, :, 0], r, upper=False, unitriangular=True)
        outputs.append(known[:, :, 1] + near[:, :, 1] @ w)
        line = torch.cat([far, near], dim=-1) if pseudo else near
        scores.append(torch.nn.functional.pad(line, (0, rows.stop - tile.stop)))
        pseudo.append(w)
    return torch.cat(pseudo, dim=-2), torch.cat(outputs, dim=-2), torch.cat(scores, dim=-2)


def _weights(scores: Tensor, beta: Tensor) -> Tensor:
    """W = A (I + L)^-1 Diag(beta)."""
    writes, reads = scores.unbind(2)
    return torch.linalg.solve_triangular(writes, reads, upper=False, left=False, unitriangular=True) * beta.mT
