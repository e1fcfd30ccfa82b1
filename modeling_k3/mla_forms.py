"""Latent attention over a long history, in blocks of keys: expanded block by block, or without any expansion.

    expanded   [k | v] = W_kvb c per block                   N + R + V products per head and pair, and the expansion
    absorbed   q' = q W_k,  o = W_v (p c)                    2 r + R products per head and pair, no expansion

Both are softmax(q k^T) v, summed in another order. With r = kv_lora_rank the expansion of S keys costs r (N + V) S per
head, so that T new tokens are cheaper absorbed as long as T (2 r - (N + V)) < r (N + V): up to 170 tokens at the
released dimensions. Scores live for one block and one tile of queries only, in at least float32. Source: arXiv
2607.24653 section 2.1.2 (NoPE: nothing has to be rotated again, so the products can be absorbed).
"""

from dataclasses import replace

import torch
from torch import Tensor

from .attention_span import AttentionSpan
from .precision import at_least_fp32, no_autocast

#: Keys per block, and scores per tile: what a core's cache holds in float32.
KEY_BLOCK = 1024
_TILE_SCORES = 2**18
#: Scores of one block without expansion.
_BLOCK_SCORES = 2**22


def prefers_absorbed(num_tokens: int, kv_lora_rank: int, nope_dim: int, value_dim: int) -> bool:
    """Whether so many new tokens are cheaper without expanding the history."""
    more = 2 * kv_lora_rank - (nope_dim + value_dim)
    return num_tokens * more <= kv_lora_rank * (nope_dim + value_dim)


def latent_attention(
    query: Tensor,
    latent: Tensor,
    shared: Tensor,
    weight: Tensor,
    span: AttentionSpan,
    *,
    scaling: float,
    absorb: bool,
    output_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from new tokens to a history of latents.

    Args:
        query: [B, H, T, N + R].
        latent, shared: [B, S, r] and [B, S, R]; the last T tokens are the new ones.
        weight: W_kvb [H * (N + Vd), r].
        span: which of them each new token may read.
        scaling: of the scores.
        absorb: leave the history unexpanded.
        output_weights: also return the weights, which then exist as a whole.

    Returns:
        [B, T, H, Vd] in query's dtype, and the weights [B, H, T, S] or None. A token that may read nothing gets some
        finite average.
    """
    with no_autocast(query.device.type):
        weight = weight.to(query.dtype)
        return _attend(query, latent, shared, weight, span, scaling, absorb=absorb, output_weights=output_weights)


def _attend(
    query: Tensor,
    latent: Tensor,
    shared: Tensor,
    weight: Tensor,
    span: AttentionSpan,
    scaling: float,
    *,
    absorb: bool,
    output_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    heads, rope = query.shape[1], shared.shape[-1]
    wide = at_least_fp32(query.dtype)
    nope = query.shape[-1] - rope
    up = weight.unflatten(0, (heads, -1))
    w_k, w_v = up[:, :nope], up[:, nope:]
    q_own, q_shared = query.split([nope, rope], dim=-1)
    if absorb:
        q_own = torch.einsum("bhtn,hnr->bhtr", q_own, w_k)
    q_own, q_shared = q_own.to(wide) * scaling, q_shared.to(wide) * scaling
    blocks, tiles = _blocks(query, latent, absorb=absorb, is_whole=output_weights or torch.compiler.is_compiling())
    # From the tensors at hand, so that a compiled graph sees that all keys are allowed to a single new token.
    span = replace(span, past=latent.shape[1] - query.shape[2])
    sums: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * len(tiles)
    kept = None
    for keys in blocks:
        c, r = latent[:, keys].to(wide), shared[:, keys].to(wide)
        if absorb:
            k, v = c.unsqueeze(1), c.unsqueeze(1)
        else:
            k, v = (torch.einsum("bsr,hnr->bhsn", c, w.to(wide)) for w in (w_k, w_v))
        for index, rows in enumerate(tiles):
            if keys.start > span.past + rows.stop - 1:
                continue
            scores = _scores(q_own[:, :, rows], k) + _scores(q_shared[:, :, rows], r.unsqueeze(1))
            rule = span.allowed(rows, keys, scores.device)
            if rule is not None:
                scores = scores.masked_fill(~rule, torch.finfo(wide).min)
            if output_weights:
                p = scores.softmax(dim=-1)
                kept = p if kept is None else torch.cat([kept, p], dim=2)
                sums[index] = (p.new_zeros(()), p.new_ones(()), _apply(p, v))
            else:
                sums[index] = _accumulate(sums[index], scores, v)
    o = torch.cat([acc / size for _, size, acc in sums], dim=2)
    if absorb:
        o = torch.einsum("bhtr,hvr->bhtv", o.to(w_v.dtype), w_v)
    return o.transpose(1, 2).to(query.dtype), None if kept is None else kept.to(query.dtype)


def _blocks(query: Tensor, latent: Tensor, *, absorb: bool, is_whole: bool) -> tuple[list[slice], list[slice]]:
    """Blocks of keys and tiles of queries [B, H, T, d]; one of each if they have to be `is_whole`."""
    batch, heads, length, _ = query.shape
    total = latent.shape[1]
    if is_whole:
        return [slice(0, total)], [slice(0, length)]
    if absorb:
        # Few queries: larger blocks, but not much more than a cache holds where they have to be widened.
        block = max(KEY_BLOCK, _BLOCK_SCORES // (batch * heads * length))
        block = block if latent.dtype == at_least_fp32(latent.dtype) else min(block, 8 * KEY_BLOCK)
        tile = length
    else:
        block = KEY_BLOCK
        tile = max(1, _TILE_SCORES // (batch * heads * min(block, total)))
    keys = [slice(i, min(i + block, total)) for i in range(0, total, block)]
    return keys, [slice(i, min(i + tile, length)) for i in range(0, length, tile)]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[B, H, t, d] x [B, H or 1, n, d] -> [B, H, t, n]; keys that all heads share are read once."""
    if k.shape[1] == q.shape[1]:
        return q @ k.mT
    return (q.flatten(1, 2) @ k[:, 0].mT).unflatten(1, q.shape[1:3])


def _apply(p: Tensor, v: Tensor) -> Tensor:
    """[B, H, t, n] x [B, H or 1, n, d] -> [B, H, t, d]."""
    if v.shape[1] == p.shape[1]:
        return p @ v
    return (p.flatten(1, 2) @ v[:, 0]).unflatten(1, p.shape[1:3])


def _accumulate(sums: tuple[Tensor, Tensor, Tensor] | None, scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add one block to the running (maximum, sum of weights, weighted values) of a softmax."""
    # The result does not depend on the reference point, so nothing flows back through it.
    top = scores.detach().amax(dim=-1, keepdim=True)
    if sums is not None:
        top = torch.maximum(top, sums[0])
    p = (scores - top).exp()
    size, acc = p.sum(dim=-1, keepdim=True), _apply(p, v)
    if sums is not None:
        fade = (sums[0] - top).exp()
        size, acc = size + sums[1] * fade, acc + sums[2] * fade
    return top, size, acc
