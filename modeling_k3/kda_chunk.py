"""KDA in chunks of 16 tokens, by matrix products, with a backward that recomputes instead of storing.

Per head and chunk, with g the decay from the chunk's start to each token (g_i includes token i) and G its rows:

    X  = [ G * beta k ; G * K^-1/2 q ]        32 rows that read
    M  = X (k / G)^T                          L = StrictTril(M_1)      A = Tril(M_2)
    R  = beta v - X_1 S                       what the state does not predict yet
    V~ = (I + L)^-1 R                         pseudo-values: token by token corrections, solved at once
    o  = X_2 S + A V~
    S <- Diag(g_C) S + (k g_C / G)^T V~

A chunk is one tile, so 1/G spans 16 tokens: with a log decay of at least -5 per token it stays below e^80, and a
constant factor e^40 moved from one side of M to the other keeps both sides far from float32's limits. Without such a
bound M is formed pair by pair from differences, whose exponents are never positive. A reference inside the chunk would
also be safe, but then rounding would let a token feel those behind it.

Source: arXiv 2607.24653 eq. 3-4, arXiv 2510.26692 section 3 (with g_C / g_i for the decay after write i).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK = 16
#: Below this log decay per token the factors of M leave float32.
SAFE_LOWER_BOUND = -5.0
#: Elements per tensor and slab, and per slab's state: about what a core's cache holds.
_SLAB = 2**18


@dataclass
class _Slab:
    """A few chunks of a few heads, [rows, n, 16, ..]: everything that does not depend on the incoming state."""

    k: Tensor
    v: Tensor
    beta: Tensor  # [rows, n, 16, 1]
    x0: Tensor  # [rows, n, 32, K]: beta k above K^-1/2 q, times `lift`
    cum: Tensor  # log g
    g: Tensor
    x: Tensor  # x0 * g
    k_in: Tensor | None  # k / (g * lift), with a bounded gate
    k_out: Tensor  # k g_C / g
    m: Tensor  # [rows, n, 32, 16]: L above A
    inverse: Tensor  # (I + L)^-1
    lift: float

    @property
    def whole(self) -> Tensor:
        """g_C, decay over the chunk, [rows, n, K]."""
        return self.g[..., -1, :]


def _prepare(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, bounded: bool) -> _Slab:
    """Form a slab from [rows, n, 16, ..] tiles."""
    lift = 2.0**58 if bounded else 1.0  # about e^40, and exact
    ones = torch.ones(CHUNK, CHUNK, dtype=q.dtype, device=q.device)
    cum = ones.tril() @ log_decay
    g = cum.exp()
    x0 = torch.cat([k * (beta * lift), q * (q.shape[-1] ** -0.5 * lift)], dim=-2)
    x = (x0.unflatten(-2, (2, CHUNK)) * g.unsqueeze(-3)).flatten(-3, -2)
    if bounded:
        k_in = k / (g * lift)
        k_out = k_in * (g[..., -1:, :] * lift)
        m = x @ k_in.mT
    else:
        k_in = None
        k_out = k * (cum[..., -1:, :] - cum).exp()
        m = torch.einsum("rnhik,rnjk,rnijk->rnhij", x0.unflatten(-2, (2, CHUNK)), k, _pair_decay(cum)).flatten(-3, -2)
    m = m * _reads(ones)
    return _Slab(k, v, beta, x0, cum, g, x, k_in, k_out, m, _invert_unit_lower(m[..., :CHUNK, :]), lift)


def _pair_decay(cum: Tensor) -> Tensor:
    """exp(cum_i - cum_j) for j <= i and 0 above, [rows, n, 16, 16, K]: no exponent is positive."""
    gap = cum.unsqueeze(-2) - cum.unsqueeze(-3)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=cum.device).triu(1)
    return gap.masked_fill_(above.unsqueeze(-1), float("-inf")).exp_()


def _reads(ones: Tensor) -> Tensor:
    """[32, 16] mask: a write sees the tokens before it (L), a read also its own (A)."""
    return torch.cat([ones.tril(-1), ones.tril()])


def _invert_unit_lower(lower: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower triangular L [.., 16, 16], by merging inverted diagonal blocks of 1, 2, 4, 8.

    [A 0; C B]^-1 = [A^-1 0; -B^-1 C A^-1 B^-1], all pairs of a level at once: substitution, not a series.
    """
    index = torch.arange(CHUNK, device=lower.device)
    inverse = torch.eye(CHUNK, dtype=lower.dtype, device=lower.device).expand_as(lower)
    size = 1
    while size < CHUNK:
        block = index // size
        joins = (block.unsqueeze(1) == block.unsqueeze(0) + 1) & (block.unsqueeze(1) % 2 == 1)
        corner = lower * joins.to(lower.dtype)
        inverse = inverse - (corner if size == 1 else inverse @ corner @ inverse)
        size *= 2
    return inverse


def _run(slab: _Slab, s: Tensor, o: Tensor | None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Walk the chunks of a slab.

    Args:
        s: [rows, K, V], the state that enters.
        o: [rows, n, 16, V] to fill, or None when only states and pseudo-values are wanted.

    Returns:
        The state that leaves, and per chunk the state that entered it and its pseudo-values.
    """
    bv = slab.v * slab.beta
    states, pseudo = [], []
    for i in range(slab.k.shape[1]):
        states.append(s)
        read = torch.bmm(slab.x[:, i], s)
        r = torch.sub(bv[:, i], read[:, :CHUNK], alpha=1 / slab.lift)
        w = torch.bmm(slab.inverse[:, i], r)
        pseudo.append(w)
        if o is not None:
            torch.baddbmm(read[:, CHUNK:], slab.m[:, i, CHUNK:], w, beta=1 / slab.lift, out=o[:, i])
        s = torch.baddbmm(s * slab.whole[:, i].unsqueeze(-1), slab.k_out[:, i].mT, w)
    return s, states, pseudo


class ChunkKDA(torch.autograd.Function):
    """The chunk form over tensors of one dtype (at least float32); see `kda_ops.chunk_kda` for the contract.

    Forward keeps the inputs and one state per slab of chunks; backward forms each slab again.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        bounded: bool,
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        final, borders = torch.empty_like(state, memory_format=torch.contiguous_format), []
        for rows in _row_groups(q, v):
            s = state[rows].flatten(0, 1)
            for span in _spans(q, rows):
                borders.append(s)
                slab = _prepare(*(_tiles(x, rows, span) for x in (q, k, v, log_decay, beta)), bounded)
                out = torch.empty_like(slab.v)
                s, _, _ = _run(slab, s, out)
                _untile(out, o, rows, span)
            final[rows] = s.view_as(final[rows])
        ctx.save_for_backward(q, k, v, log_decay, beta, *borders)
        ctx.bounded = bounded
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, do: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, beta, *borders = ctx.saved_tensors
        inputs = (q, k, v, log_decay, beta)
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        d_state = torch.empty_like(d_final, memory_format=torch.contiguous_format)
        entered = iter(reversed(borders))
        groups = list(_row_groups(q, v))
        for rows in reversed(groups):
            ds = d_final[rows].flatten(0, 1)
            for span in reversed(list(_spans(q, rows))):
                slab = _prepare(*(_tiles(x, rows, span) for x in inputs), ctx.bounded)
                ds, pieces = _slab_backward(slab, next(entered), _tiles(do, rows, span), ds)
                for piece, grad in zip(pieces, grads, strict=True):
                    _untile(piece, grad, rows, span)
            d_state[rows] = ds.view_as(d_state[rows])
        return (*grads, d_state, None)


def _slab_backward(slab: _Slab, s: Tensor, do: Tensor, ds: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradients of one slab: of the state that entered, and of q, k, v, log decay, beta as tiles."""
    _, states, pseudo = _run(slab, s, None)
    dp = torch.cat([torch.empty_like(do), do], dim=-2)  # of the reads: -dR above dO
    dx, d_out, d_whole = torch.empty_like(slab.x), torch.empty_like(slab.k), torch.empty_like(slab.whole)
    w = torch.stack(pseudo, dim=1)
    dw = slab.m[..., CHUNK:, :].mT @ do
    for i in reversed(range(slab.k.shape[1])):
        dr = slab.inverse[:, i].mT @ torch.baddbmm(dw[:, i], slab.k_out[:, i], ds)
        torch.neg(dr, out=dp[:, i, :CHUNK])
        torch.bmm(dp[:, i], states[i].mT, out=dx[:, i])
        torch.bmm(w[:, i], ds.mT, out=d_out[:, i])
        torch.sum(ds * states[i], dim=-1, out=d_whole[:, i])
        ds = torch.baddbmm(ds * slab.whole[:, i].unsqueeze(-1), slab.x[:, i].mT, dp[:, i], alpha=1 / slab.lift)
    dm = (dp @ w.mT) * _reads(torch.ones(CHUNK, CHUNK, dtype=do.dtype, device=do.device))
    dx = dx * (1 / slab.lift)
    halves = (2, CHUNK)
    if slab.k_in is not None:
        dx0 = ((dx + dm @ slab.k_in).unflatten(-2, halves) * slab.g.unsqueeze(-3)).flatten(-3, -2)
        dk_in = (dm.mT @ slab.x) / (slab.g * slab.lift)
    else:
        decay, x0, dmh = _pair_decay(slab.cum), slab.x0.unflatten(-2, halves), dm.unflatten(-2, halves)
        dx0 = (dx.unflatten(-2, halves) * slab.g.unsqueeze(-3)).flatten(-3, -2)
        dx0 = dx0 + torch.einsum("rnhij,rnjk,rnijk->rnhik", dmh, slab.k, decay).flatten(-3, -2)
        dk_in = torch.einsum("rnhij,rnhik,rnijk->rnjk", dmh, x0, decay)
    d_gain = d_out * slab.k_out  # of log(g_C / g)
    to_end = (slab.cum[..., -1:, :] - slab.cum).exp()
    d_kb, d_q = dx0.unflatten(-2, halves).unbind(-3)
    dv = dp[..., :CHUNK, :] * -1.0
    dk = d_kb * (slab.beta * slab.lift) + dk_in + d_out * to_end
    d_cum = (slab.x0 * dx0).unflatten(-2, halves).sum(-3) - slab.k * dk_in - d_gain
    d_cum[..., -1, :] += d_gain.sum(-2) + d_whole * slab.whole
    ones = torch.ones(CHUNK, CHUNK, dtype=do.dtype, device=do.device)
    d_beta = (d_kb * slab.k).sum(-1, keepdim=True) * slab.lift + (dv * slab.v).sum(-1, keepdim=True)
    dq = d_q * (slab.k.shape[-1] ** -0.5 * slab.lift)
    return ds, (dq, dk, dv * slab.beta, ones.triu() @ d_cum, d_beta)


def _row_groups(q: Tensor, v: Tensor) -> Iterator[tuple[slice, slice]]:
    """Split batch and heads so that the states of a group fit in the cache."""
    batch, _, heads, _ = q.shape
    fits = max(1, _SLAB // (q.shape[-1] * v.shape[-1]))
    head_step, batch_step = min(heads, fits), max(1, fits // heads)
    for b in range(0, batch, batch_step):
        for h in range(0, heads, head_step):
            yield slice(b, min(b + batch_step, batch)), slice(h, min(h + head_step, heads))


def _spans(q: Tensor, rows: tuple[slice, slice]) -> Iterator[slice]:
    """Split the tokens so that a tensor of the slab fits in the cache; borders are multiples of 16."""
    count = (rows[0].stop - rows[0].start) * (rows[1].stop - rows[1].start)
    step = max(1, _SLAB // (count * CHUNK * q.shape[-1])) * CHUNK
    for start in range(0, q.shape[1], step):
        yield slice(start, min(start + step, q.shape[1]))


def _tiles(x: Tensor, rows: tuple[slice, slice], span: slice) -> Tensor:
    """[B, T, H, X] -> [rows, n, 16, X], the last chunk padded with zeros: no decay, no write."""
    x = x[rows[0], span, rows[1]]
    if x.shape[1] % CHUNK:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.transpose(1, 2).unflatten(2, (-1, CHUNK)).flatten(0, 1).contiguous()


def _untile(tiles: Tensor, x: Tensor, rows: tuple[slice, slice], span: slice) -> None:
    """Write [rows, n, 16, X] back to where `_tiles` read it."""
    place = x[rows[0], span, rows[1]]
    place.copy_(tiles.flatten(1, 2).unflatten(0, (-1, place.shape[2]))[:, :, : place.shape[1]].transpose(1, 2))
