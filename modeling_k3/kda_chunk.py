"""KDA in chunks of 16 tokens, by matrix products, with a backward that recomputes instead of storing.

Per head and chunk, with g the decay from the chunk's start to each token (g_i includes token i) and G its rows:

    X  = [ G * k ; G * q ]                    32 rows that read
    P  = X (k / G)^T                          L = Diag(beta) StrictTril(P_1)      A = K^-1/2 Tril(P_2)
    R  = v - X_1 S                            what the state does not predict yet
    V~ = (I + L)^-1 Diag(beta) R              pseudo-values: token by token corrections, solved at once
    o  = K^-1/2 X_2 S + A V~
    S <- Diag(g_C) S + (k g_C / G)^T V~

A chunk is one tile, so 1/G spans 16 tokens: with a log decay of at least -5 per token it stays below e^80, and a
constant factor e^-40 on it keeps P and its gradients far from float32's limits. Without such a bound P is formed row by
row from keys that decay from token to token, so that no factor exceeds 1. A reference inside the chunk would also be
safe, but then rounding would let a token feel those behind it.

Tensors of a slab have the chunk first, [n, rows, 16, ..], rows = batch and heads: one chunk of all rows is then one
contiguous batch of matrices. They live in buffers that are used again by the next slab, since fresh memory costs more
than the arithmetic here.

Products stay in float32 for bfloat16 inputs too. On a CPU with AVX512-BF16 those with 16 or 32 rows run 2 to 2.7 times
as fast in bfloat16, but casting the state for each chunk takes that back: no gain as a whole, at an error of 5e-4.

Source: arXiv 2607.24653 eq. 3-4, arXiv 2510.26692 section 3 (with g_C / g_i for the decay after write i).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .kda_slab import CHUNK, LIFT, Buffers, Slab, as_batch, decayed_keys, prepare
from .precision import no_autocast

#: Elements per tensor of a slab, and of its state: about what a core's cache holds.
_SLAB = 2**17

Rows = tuple[slice, slice]


def _walk(slab: Slab, states: list[Tensor], r: list[Tensor], w: list[Tensor], o: Tensor | None) -> None:
    """Walk the chunks of a slab.

    Args:
        states: n + 1 tensors [rows, K, V], the first one given, the others filled; all may be the same memory.
        r, w: n tensors [rows, 16, V], filled with R and V~.
        o: [n, rows, 16, V] to fill, or None.
    """
    scale = slab.k.shape[-1] ** -0.5
    x = slab.x if o is not None else slab.x[..., :CHUNK, :]
    seen = r[0].new_empty(x.shape[1], x.shape[2], r[0].shape[-1])
    v, solve, read, k_out, whole = (y.unbind(0) for y in (slab.v, slab.solve, slab.read, slab.k_out.mT, slab.whole))
    for i, x_i in enumerate(x.unbind(0)):
        torch.bmm(x_i, states[i], out=seen)
        torch.sub(v[i], seen[:, :CHUNK].view(v[i].shape), out=r[i].view(v[i].shape))
        torch.bmm(solve[i], r[i], out=w[i])
        if o is not None:
            torch.baddbmm(seen[:, CHUNK:], read[i], w[i], beta=scale, alpha=scale, out=o[i])
        torch.mul(states[i], whole[i], out=states[i + 1]).baddbmm_(k_out[i], w[i])


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
        snapshot_every: int | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs, buffers, needs_grad = (q, k, v, log_decay, beta), Buffers(v), any(ctx.needs_input_grad)
        o, final, borders = _padded_like(v), torch.empty_like(state, memory_format=torch.contiguous_format), []
        snapshots = None
        if snapshot_every is not None:
            snapshots = state.new_empty(state.shape[0], q.shape[1] // snapshot_every, *state.shape[1:])
        for rows in _row_groups(q, v):
            s = state[rows].flatten(0, 1).clone()
            for span in _spans(q, rows, snapshot_every):
                if needs_grad:
                    borders.append(s.clone())
                slab = prepare([_tiles(x, rows, span) for x in inputs], bounded, buffers)
                n, shape = slab.x.shape[0], (*slab.v.shape[:3], CHUNK, v.shape[-1])
                r, w = (buffers.take(name, *s.shape[:1], CHUNK, shape[-1]) for name in "rw")
                out = buffers.take("o", *shape)
                _walk(slab, [s] * (n + 1), [r] * n, [w] * n, out.flatten(1, 2))
                _tiles(o, rows, span).copy_(out)
                if snapshots is not None and span.stop % snapshot_every == 0:
                    place = snapshots[rows[0], span.stop // snapshot_every - 1, rows[1]]
                    place.copy_(s.view_as(place))
            final[rows] = s.view_as(final[rows])
        ctx.save_for_backward(*inputs, *borders)
        ctx.bounded, ctx.snapshot_every = bounded, snapshot_every
        if snapshots is not None:
            ctx.mark_non_differentiable(snapshots)
        return o[:, : v.shape[1]], final, snapshots

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, do: Tensor, d_final: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        with no_autocast(do.device.type):
            return ChunkKDA._gradients(ctx, do, d_final)

    @staticmethod
    def _gradients(ctx: FunctionCtx, do: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: checkpointing recomputes at the first read and refuses a second.
        saved = ctx.saved_tensors
        inputs, entered, buffers = saved[:5], iter(reversed(saved[5:])), Buffers(do)
        grads = [_padded_like(x) for x in inputs]
        d_state = torch.empty_like(d_final, memory_format=torch.contiguous_format)
        for rows in reversed(list(_row_groups(inputs[0], do))):
            ds = d_final[rows].flatten(0, 1).clone()
            for span in reversed(list(_spans(inputs[0], rows, ctx.snapshot_every))):
                slab = prepare([_tiles(x, rows, span) for x in inputs], ctx.bounded, buffers)
                places = [_tiles(x, rows, span) for x in grads]
                _slab_backward(slab, next(entered), _tiles(do, rows, span), ds, places, buffers)
            d_state[rows] = ds.view_as(d_state[rows])
        return (*(x[:, : do.shape[1]] for x in grads), d_state, None, None)


def _slab_backward(slab: Slab, s: Tensor, do: Tensor, ds: Tensor, places: list[Tensor], buffers: Buffers) -> None:
    """Gradients of one slab.

    Args:
        s: [rows, K, V], the state that entered.
        do: tiles of the gradient of o.
        ds: gradient of the state that leaves; becomes that of the state that entered.
        places: tiles to fill with the gradients of q, k, v, log decay and beta.
    """
    n, rows, _, width = slab.x.shape
    depth, scale, tiles = s.shape[-1], width**-0.5, slab.v.shape[:3]
    states = buffers.take("states", n + 1, rows, width, depth)
    states[0].copy_(s)
    r, w = (buffers.take(name, n, rows, CHUNK, depth) for name in "rw")
    _walk(slab, list(states.unbind(0)), list(r.unbind(0)), list(w.unbind(0)), None)
    dp = buffers.take("dp", n, rows, 2 * CHUNK, depth)  # of what was read from S: -dR above K^-1/2 dO
    torch.mul(do, scale, out=dp[..., CHUNK:, :].unflatten(1, tiles[1:]))
    dw, dy = buffers.take("dw", n, rows, CHUNK, depth), buffers.take("dy", n, rows, CHUNK, depth)
    torch.bmm(as_batch(slab.read).mT, as_batch(dp[..., CHUNK:, :]), out=as_batch(dw))
    dx, d_out = buffers.take("dx", *slab.x.shape), buffers.take("d_out", *slab.k_out.shape)
    d_whole, product = buffers.take("d_whole", n, rows, width), buffers.take("product", rows, width, depth)
    for i in reversed(range(n)):
        dw[i].baddbmm_(slab.k_out[i], ds)
        torch.bmm(slab.inverse[i].mT, dw[i], out=dy[i])
        torch.mul(dy[i], -slab.beta[i], out=dp[i, :, :CHUNK])
        torch.bmm(dp[i], states[i].mT, out=dx[i])
        torch.bmm(w[i], ds.mT, out=d_out[i])
        torch.sum(torch.mul(ds, states[i], out=product), dim=-1, out=d_whole[i])
        ds.mul_(slab.whole[i]).baddbmm_(slab.x[i].mT, dp[i])
    scores = buffers.take("p", n, rows, 2 * CHUNK, CHUNK)
    torch.bmm(as_batch(dp), as_batch(w).mT, out=as_batch(scores))
    scores[..., :CHUNK, :].tril_(-1)
    scores[..., CHUNK:, :].tril_()
    errors = as_batch(r).baddbmm_(as_batch(slab.write), as_batch(w), alpha=-1).view_as(dy)
    places[4].copy_(errors.mul_(dy).sum(-1, keepdim=True).unflatten(1, tiles[1:]))
    torch.neg(dp[..., :CHUNK, :].unflatten(1, tiles[1:]), out=places[2])
    _gate_backward(slab, scores, dx, d_out, d_whole * slab.whole.squeeze(-1), places, buffers)


def _gate_backward(
    slab: Slab, dp: Tensor, dx: Tensor, d_out: Tensor, d_cum_end: Tensor, places: list[Tensor], buffers: Buffers
) -> None:
    """From the gradients of P, X, k g_C / g and log g_C to those of q, k and the log decay. Overwrites dx and d_out."""
    tiles = slab.k.shape[:3]
    if slab.k_in is not None:
        as_batch(dx).baddbmm_(as_batch(dp), as_batch(slab.k_in), beta=1 / LIFT)
        dk = buffers.take("dk", *slab.k.shape)
        torch.bmm(as_batch(dp).mT, as_batch(slab.x), out=as_batch(dk))
        dk.div_(slab.g)
        dx = dx.view(*tiles, 2, CHUNK, -1).mul_((slab.g * LIFT).unsqueeze(3))
        d_out = d_out.view_as(dk).mul_(slab.g[..., -1:, :] / slab.g)
        dk.add_(d_out)
    else:
        dx = dx.view(*tiles, 2, CHUNK, -1).mul_(slab.g.unsqueeze(3))
        dk, d_out = _free_backward(slab, dp.view(*tiles, 2, CHUNK, CHUNK), dx, d_out.view(slab.k.shape), buffers)
    d_write, d_read = dx.unbind(3)
    places[0].copy_(d_read)
    torch.add(d_write, dk, out=places[1])
    d_cum = d_write.sub_(dk).mul_(slab.k).addcmul_(slab.q, d_read)
    d_cum[..., -1, :] += d_out.mul_(slab.k).sum(-2) + d_cum_end.view(*tiles, -1)
    places[3].copy_(dp.new_ones(CHUNK, CHUNK).triu() @ d_cum)


def _free_backward(slab: Slab, dp: Tensor, dx: Tensor, d_out: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
    """Without a bound: add to dx [n, b, h, 2, 16, K]; return the gradients of k through k / g and through k g_C / g.

    The first includes the second. Both follow the decayed keys back from the end of the chunk.
    """
    for i, keys in decayed_keys(slab.k, slab.step, buffers.take("keys", *slab.k.shape)):
        dx[..., i, :] += dp[..., i, : i + 1] @ keys
    dk, through_end = d_out, buffers.take("dk", *slab.k.shape).copy_(d_out)
    for i in reversed(range(CHUNK)):
        reader = torch.stack([slab.k[..., i, :], slab.q[..., i, :]], dim=-2)
        dk[..., : i + 1, :] += dp[..., i, : i + 1].mT @ reader
        for grad in (dk, through_end):
            grad[..., :i, :] *= slab.step[..., i : i + 1, :]
    return dk, through_end


def _row_groups(q: Tensor, v: Tensor) -> Iterator[Rows]:
    """Split batch and heads so that the states of a group fit in the cache."""
    batch, _, heads, _ = q.shape
    fits = max(1, _SLAB // (q.shape[-1] * v.shape[-1]))
    head_step, batch_step = min(heads, fits), max(1, fits // heads)
    for b in range(0, batch, batch_step):
        for h in range(0, heads, head_step):
            yield slice(b, min(b + batch_step, batch)), slice(h, min(h + head_step, heads))


def _spans(q: Tensor, rows: Rows, snapshot_every: int | None) -> Iterator[slice]:
    """Split the tokens so that a tensor of the slab fits in the cache; borders are multiples of 16.

    A span ends where a snapshot is due.
    """
    count = (rows[0].stop - rows[0].start) * (rows[1].stop - rows[1].start)
    step, start = max(1, _SLAB // (count * CHUNK * q.shape[-1])) * CHUNK, 0
    while start < q.shape[1]:
        stop = min(start + step, q.shape[1])
        if snapshot_every is not None:
            stop = min(stop, (start // snapshot_every + 1) * snapshot_every)
        yield slice(start, stop)
        start = stop


def _padded_like(x: Tensor) -> Tensor:
    """Uninitialised [B, T, ..] with T rounded up to whole chunks."""
    return x.new_empty(x.shape[0], x.shape[1] + -x.shape[1] % CHUNK, *x.shape[2:])


def _tiles(x: Tensor, rows: Rows, span: slice) -> Tensor:
    """View [B, T, H, X] as tiles [n, b, h, 16, X]; a last chunk that x cuts short is padded with zeros.

    A padding token neither decays the state nor writes to it.
    """
    x = x[rows[0], span.start : span.stop + -span.stop % CHUNK, rows[1]]
    if x.shape[1] % CHUNK:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4)
