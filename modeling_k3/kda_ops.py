"""KDA as pure functions: decay gate, the recurrence (the truth) and its chunkwise form by matrix products.

One signature for every path:

    o, state = path(q, k, v, log_decay, beta, state)

    q, k       [B, T, H, K]   L2-normalised; the scale K^-1/2 is applied inside
    v          [B, T, H, V]
    log_decay  [B, T, H, K]   natural log of the decay, never above 0
    beta       [B, T, H]      write strength, after the sigmoid
    state      [B, H, K, V]   in at least float32, or None for zeros; never written to
    o          [B, T, H, V]   in at least float32

Everything inside is at least float32; float64 inputs stay float64.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import at_least_fp32, upcast

CHUNK = 64
TILE = 16
#: Below this log decay per step the tile factors e^(8 * 5) of the bounded form would leave float32's accurate range.
SAFE_LOWER_BOUND = -5.0


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(sum(x^2) + eps) over the last dimension, in at least float32.

    A sum, not a mean: eps is fixed and a zero vector stays zero. Source: fla `l2norm`, released kernels.
    """
    x = upcast(x)
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def decay_gate(logits: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None) -> Tensor:
    """Return the log decay per key channel.

        bounded:   l = b sigmoid(e^A (z + dt_bias))        in (b, 0)
        softplus:  l = -e^A softplus(z + dt_bias)          below 0, unbounded

    Two different functions; the bounded one is not a clamp of the other.

    Args:
        logits: z [B, T, H * K], head-major.
        a_log: A [H].
        dt_bias: [H * K], added before the multiplication by e^A.
        lower_bound: b below 0, or None for the softplus form.

    Returns:
        [B, T, H, K] in at least float32.

    Source: arXiv 2607.24653 eq. 5; arXiv 2510.26692 for the softplus form.
    """
    heads = a_log.shape[0]
    r = (upcast(logits) + dt_bias).unflatten(-1, (heads, -1))
    rate = upcast(a_log).exp()[:, None]
    if lower_bound is None:
        return -rate * F.softplus(r)
    return lower_bound * torch.sigmoid(rate * r)


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the definition of Kimi Delta Attention, token by token.

        S <- Diag(e^l) S            decay first,
        e  = beta (v - S^T k)       the prediction reads the decayed state,
        S <- S + k e^T
        o  = S^T q K^-1/2           the read sees its own token's write

    Args and returns: see the module; with `cu_seqlens` as in `chunk_kda`.
    Source: arXiv 2607.24653 eq. 1-2.
    """
    if cu_seqlens is not None:
        return _per_sequence(recurrent_kda, q, k, v, log_decay, beta, state, cu_seqlens)
    q, k, v, log_decay, beta, s = _prepare(q, k, v, log_decay, beta, state)
    q, decay, beta = q * q.shape[-1] ** -0.5, log_decay.exp(), beta.unsqueeze(-1)
    outputs = []
    for t in range(q.shape[1]):
        s = s * decay[:, t].unsqueeze(-1)
        error = beta[:, t] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t]))
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(outputs, dim=1), s


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run Kimi Delta Attention chunk by chunk of C = 64 tokens, as matrix products.

    With g the running decay inside a chunk (g_i includes token i), G = its rows, g_C its last row:

        L  = StrictTril( Diag(beta) (G*K)(K/G)^T )         A = Tril( (G*Q)(K/G)^T ) K^-1/2
        [W | U] = (I + L)^-1 Diag(beta) [G*K | V]          forward substitution
        V~ = U - W S          O = (G*Q) S K^-1/2 + A V~
        S <- Diag(g_C) S + (K g_C/G)^T V~

    1/G is never formed over a chunk: L and A are built from 16-token tiles. Off-diagonal tiles only multiply decays,
    so no exponent is positive. Diagonal tiles are centred on their middle token when `lower_bound` promises that
    this stays in range, and are formed pair by pair otherwise.

    Args:
        lower_bound: a promise that no `log_decay` lies below it; at least -5. None: nothing is promised.
        cu_seqlens: [N + 1] borders of N sequences packed in one row (B = 1); then `state` is [N, H, K, V].
        others: see the module.

    Returns:
        o [B, T, H, V] and the final state [B, H, K, V], both in at least float32.

    Source: arXiv 2607.24653 eq. 3-4, arXiv 2510.26692 section 3 (with the decay after write i as g_C/g_i).
    """
    if cu_seqlens is not None:
        return _per_sequence(chunk_kda, q, k, v, log_decay, beta, state, cu_seqlens, lower_bound=lower_bound)
    q, k, v, log_decay, beta, s = _prepare(q, k, v, log_decay, beta, state)
    length = q.shape[1]
    size = min(CHUNK, -(-length // TILE) * TILE)
    q, k, v, log_decay, beta = (_to_chunks(x, size) for x in (q, k, v, log_decay, beta.unsqueeze(-1)))
    q = q * q.shape[-1] ** -0.5

    # Decays are summed from the tile's own start, not the chunk's: short sums keep float32 exact to the last bits.
    tiled = log_decay.unflatten(-2, (-1, TILE)).cumsum(-2)  # [B, H, n, tiles, 16, K], to the token inside its tile
    total = tiled[..., -1, :]  # [B, H, n, tiles, K], over the whole tile
    before = F.pad(total, (0, 0, 1, -1)).cumsum(-2)  # over the tiles before
    after = total.flip(-2).cumsum(-2).flip(-2) - total  # over the tiles behind
    to_token = (tiled + before.unsqueeze(-2)).flatten(-3, -2).exp()  # G
    to_end = (total.unsqueeze(-2) - tiled + after.unsqueeze(-2)).flatten(-3, -2).exp()  # g_C / G
    whole = total.sum(-2).exp()  # g_C

    scores_q, scores_k = _scores(q, k * beta, k, tiled, total, lower_bound)
    rows = torch.cat([beta * to_token * k, beta * v], dim=-1)
    solved = torch.linalg.solve_triangular(scores_k.tril(-1), rows, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    q_in, k_out = q * to_token, (k * to_end).mT

    outputs = []
    for n in range(q.shape[2]):
        pseudo = u[:, :, n] - w[:, :, n] @ s
        outputs.append(q_in[:, :, n] @ s + scores_q[:, :, n] @ pseudo)
        s = whole[:, :, n].unsqueeze(-1) * s + k_out[:, :, n] @ pseudo
    o = torch.cat(outputs, dim=2)[:, :, :length]
    return o.transpose(1, 2), s


def _scores(
    q: Tensor, k_rows: Tensor, k: Tensor, tiled: Tensor, total: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """Return Tril((G*Q)(K/G)^T) and the same for `k_rows`, each [B, H, n, C, C], from 16 x 16 tiles."""
    rows = torch.cat([q.unflatten(-2, (-1, TILE)), k_rows.unflatten(-2, (-1, TILE))], dim=-2)  # [.., tiles, 32, K]
    cols = k.unflatten(-2, (-1, TILE))
    row_decay = torch.cat([tiled, tiled], dim=-2)
    diagonal = _diagonal_tiles(rows, cols, row_decay, tiled, lower_bound)

    rows = rows * row_decay.exp()
    cols = cols * (total.unsqueeze(-2) - tiled).exp()  # decayed to the end of their own tile
    num_tiles, blocks = cols.shape[-3], []
    for a in range(num_tiles):
        parts = [diagonal[..., a, :, :]]
        if a:
            between = F.pad(total[..., 1:a, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()
            earlier = (cols[..., :a, :, :] * between.unsqueeze(-2)).flatten(-3, -2)
            parts.insert(0, rows[..., a, :, :] @ earlier.mT)
        block = torch.cat(parts, dim=-1)
        blocks.append(F.pad(block, (0, num_tiles * TILE - block.shape[-1])))
    both = torch.stack(blocks, dim=-3)  # [B, H, n, tiles, 32, C]
    scores_q, scores_k = both.split(TILE, dim=-2)
    return scores_q.flatten(-3, -2), scores_k.flatten(-3, -2)


def _diagonal_tiles(
    rows: Tensor, cols: Tensor, row_decay: Tensor, col_decay: Tensor, lower_bound: float | None
) -> Tensor:
    """Return the lower triangles of the tiles on the diagonal, [.., tiles, 32, 16]."""
    lower = torch.ones(TILE, TILE, dtype=torch.bool, device=rows.device).tril().repeat(2, 1)
    if lower_bound is not None and lower_bound >= SAFE_LOWER_BOUND:
        middle = col_decay[..., TILE // 2 - 1 : TILE // 2, :]
        tiles = (rows * (row_decay - middle).exp()) @ (cols * (middle - col_decay).exp()).mT
        return tiles.masked_fill(~lower, 0.0)
    gap = row_decay.unsqueeze(-2) - col_decay.unsqueeze(-3)
    gap = gap.masked_fill(~lower.unsqueeze(-1), float("-inf"))
    return torch.einsum("...ik,...jk,...ijk->...ij", rows, cols, gap.exp())


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring everything to one dtype of at least float32 and spell out the initial state."""
    dtype = at_least_fp32(torch.promote_types(q.dtype, v.dtype))
    batch, _, heads, key_dim = q.shape
    if state is None:
        state = q.new_zeros(batch, heads, key_dim, v.shape[-1], dtype=dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype), log_decay.to(dtype), beta.to(dtype), state.to(dtype)


def _to_chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, H, X] -> [B, H, n, size, X], padded with zeros: no decay, no write."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4).contiguous()


def _per_sequence(
    path: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor,
    **options: float | None,
) -> tuple[Tensor, Tensor]:
    """Run `path` on each sequence of a packed row; the states come back as [N, H, K, V].

    Raises:
        ValueError: more than one row, borders that do not cover it, or a state of the wrong count.
    """
    borders = cu_seqlens.tolist()
    if q.shape[0] != 1 or borders[0] != 0 or borders[-1] != q.shape[1] or sorted(set(borders)) != borders:
        raise ValueError(
            f"cu_seqlens={borders} must rise strictly from 0 to the row length {q.shape[1]} of a batch of one, "
            f"got a batch of {q.shape[0]}"
        )
    count = len(borders) - 1
    if state is not None and state.shape[0] != count:
        raise ValueError(f"state holds {state.shape[0]} sequences, cu_seqlens={borders} names {count}")
    outputs, states = [], []
    for i, (start, stop) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
        piece = (x[:, start:stop] for x in (q, k, v, log_decay, beta))
        o, s = path(*piece, None if state is None else state[i : i + 1], **options)
        outputs.append(o)
        states.append(s)
    return torch.cat(outputs, dim=1), torch.cat(states)
