"""KDA as pure functions: decay gate, the recurrence (the truth) and its chunkwise form by matrix products.

One signature for every path:

    o, state = path(q, k, v, log_decay, beta, state)

    q, k       [B, T, H, K]   L2-normalised; the scale K^-1/2 is applied inside
    v          [B, T, H, V]
    log_decay  [B, T, H, K]   natural log of the decay, never above 0
    beta       [B, T, H]      write strength, after the sigmoid
    state      [B, H, K, V]   in at least float32, or None for zeros; never written to unless asked
    o          [B, T, H, V]   in at least float32

Everything inside is at least float32; float64 inputs stay float64.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .kda_chunk import ChunkKDA
from .kda_exact import exact_attention
from .kda_slab import CHUNK, SAFE_LOWER_BOUND
from .precision import at_least_fp32, no_autocast, upcast


def _outside_autocast(path: Callable[..., Any]) -> Callable[..., Any]:
    """Keep autocast out of a recurrence: its products would become bf16."""

    @functools.wraps(path)
    def run(q: Tensor, *args: Any, **options: Any) -> Any:
        with no_autocast(q.device.type):
            return path(q, *args, **options)

    return run


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


@_outside_autocast
def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    in_place: bool = False,
    use_delta_rule: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run the definition of Kimi Delta Attention, token by token.

        S <- Diag(e^l) S            decay first,
        e  = beta (v - S^T k)       the prediction reads the decayed state,
        S <- S + k e^T
        o  = S^T q K^-1/2           the read sees its own token's write

    Relations: without the delta rule and without decay this is linear attention, o_t = K^-1/2 sum_s beta_s (q_t k_s)
    v_s; with one decay for all channels of a head it is the gated delta rule.

    Args:
        cu_seqlens: as in `chunk_kda`.
        in_place: write the final state into `state`, which must then be [B, H, K, V] in at least float32: a decode
            step without a temporary of that size. Not for gradients or packed rows.
        use_delta_rule: False leaves the prediction out, e = beta v. Only to compare with linear attention.
        others: see the module.

    Returns:
        o [B, T, H, V] and the final state [B, H, K, V] (`state` itself with `in_place`).

    Raises:
        ValueError: `in_place` without a state of the right dtype, with gradients, or with `cu_seqlens`.

    Source: arXiv 2607.24653 eq. 1-2; arXiv 2412.06464 for the gated delta rule.
    """
    given = (q, k, v, log_decay, beta, *([] if state is None else [state]))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if in_place:
        _check_in_place(q, v, state, needs_grad, cu_seqlens)
    if cu_seqlens is not None:
        options = {"use_delta_rule": use_delta_rule}
        return _per_sequence(recurrent_kda, q, k, v, log_decay, beta, state, cu_seqlens, **options)
    q, k, v, log_decay, beta, s = _prepare(q, k, v, log_decay, beta, state)
    if not (needs_grad or in_place) and state is not None:
        s = s.clone()
    rows = (x.transpose(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v, log_decay.exp(), beta.unsqueeze(-1)))
    q, k, v, decay, beta = rows
    o = []
    for t in range(q.shape[2]):
        at = slice(t, t + 1)
        key, gate = k[:, :, at], decay[:, :, at].mT
        s = s * gate if needs_grad else s.mul_(gate)
        error = v[:, :, at] - key @ s if use_delta_rule else v[:, :, at]
        write = key.mT * (beta[:, :, at] * error) if needs_grad else None
        s = s + write if needs_grad else _add_outer_(s, key, beta[:, :, at] * error)
        o.append(q[:, :, at] @ s)
    return (torch.cat(o, dim=2) if o else v).transpose(1, 2), s


def _add_outer_(s: Tensor, key: Tensor, error: Tensor) -> Tensor:
    """s += key^T error in one pass; s [B, H, K, V] may be a view."""
    rows = s.view(-1, *s.shape[-2:]) if s.is_contiguous() else s.flatten(0, 1)
    rows.baddbmm_(key.flatten(0, 1).mT, error.flatten(0, 1))
    return rows.view_as(s)


def _check_in_place(q: Tensor, v: Tensor, state: Tensor | None, needs_grad: bool, cu_seqlens: Tensor | None) -> None:
    dtype = at_least_fp32(torch.promote_types(q.dtype, v.dtype))
    shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    found = "None" if state is None else f"{list(state.shape)} {state.dtype}"
    if state is None or tuple(state.shape) != shape or state.dtype != dtype or not state.is_contiguous():
        raise ValueError(
            f"in_place=True with state {found} is not allowed: it must be contiguous {list(shape)} {dtype}"
        )
    if needs_grad or cu_seqlens is not None:
        what = "gradients" if needs_grad else "cu_seqlens"
        raise ValueError(f"in_place=True with {what} is not allowed: the incoming state would be lost")


@_outside_autocast
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
    snapshot_every: int | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Run Kimi Delta Attention in chunks of 16 tokens, by matrix products; equal to `recurrent_kda` up to rounding.

    Memory is linear in T with a small working set; backward recomputes. Outputs up to token t are bit-equal whatever
    follows t. The algebra stands in `kda_chunk`.

    Args:
        cu_seqlens: [N + 1] borders of N sequences packed in one row (B = 1); then `state` is [N, H, K, V].
        lower_bound: a promise that no `log_decay` lies below it; used from -5 upwards. None: nothing is promised.
        snapshot_every: also return the states after every so many tokens, a multiple of 16; without a gradient, and
            not for packed rows.
        others: see the module.

    Returns:
        o [B, T, H, V] and the final state [B, H, K, V], both in at least float32; with `snapshot_every` also the
        states [B, T // snapshot_every, H, K, V].

    Raises:
        ValueError: `snapshot_every` that is no positive multiple of 16, or with `cu_seqlens`.
    """
    if snapshot_every is not None and (snapshot_every < CHUNK or snapshot_every % CHUNK or cu_seqlens is not None):
        where = "" if cu_seqlens is None else " with cu_seqlens"
        raise ValueError(
            f"snapshot_every={snapshot_every}{where} is not allowed: a positive multiple of {CHUNK}, for rows that are "
            "not packed"
        )
    if cu_seqlens is not None:
        return _per_sequence(chunk_kda, q, k, v, log_decay, beta, state, cu_seqlens, lower_bound=lower_bound)
    bounded = lower_bound is not None and lower_bound >= SAFE_LOWER_BOUND
    q, k, v, log_decay, beta, s = _prepare(q, k, v, log_decay, beta, state)
    o, s, snapshots = ChunkKDA.apply(q, k, v, log_decay, beta.unsqueeze(-1), s, bounded, snapshot_every)
    return (o, s) if snapshots is None else (o, s, snapshots)


@_outside_autocast
def exact_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    output_weights: bool = False,
    arithmetic: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Run Kimi Delta Attention in its attention-matrix form: the precise branch, at a cost of T^2 per head.

    For comparison, for inspection and as the fallback of a faster path; see `kda_exact`.

    Args:
        output_weights: also return the effective attention weights [B, H, T, T]; not for packed sequences.
        arithmetic: float64, after which float32 results are off by their last rounding only, or float32, at half the
            cost and about as exact as the chunk form. Devices without float64 need the latter.
        others: see the module and `chunk_kda`.

    Raises:
        ValueError: weights of packed sequences, weights above 2 GiB, or another dtype.
    """
    if arithmetic not in (torch.float32, torch.float64):
        raise ValueError(f"arithmetic={arithmetic} is not allowed: torch.float32 or torch.float64")
    if cu_seqlens is not None:
        if output_weights:
            raise ValueError("output_weights=True with cu_seqlens is not allowed: call once per sequence")
        return _per_sequence(exact_kda, q, k, v, log_decay, beta, state, cu_seqlens, arithmetic=arithmetic)
    inputs = _prepare(q, k, v, log_decay, beta, state)
    dtype = inputs[0].dtype
    wide = (x.to(torch.promote_types(dtype, arithmetic)) for x in inputs)
    o, final, weights = exact_attention(*wide, output_weights=output_weights)
    results = (o, final) if weights is None else (o, final, weights)
    return tuple(x.to(dtype) for x in results)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring everything to one dtype of at least float32 and spell out the initial state."""
    dtype = at_least_fp32(torch.promote_types(q.dtype, v.dtype))
    batch, _, heads, key_dim = q.shape
    if state is None:
        state = q.new_zeros(batch, heads, key_dim, v.shape[-1], dtype=dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype), log_decay.to(dtype), beta.to(dtype), state.to(dtype)


def _per_sequence(
    path: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor,
    **options: Any,
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
    for i, (start, stop) in enumerate(itertools.pairwise(borders)):
        piece = (x[:, start:stop] for x in (q, k, v, log_decay, beta))
        o, s = path(*piece, None if state is None else state[i : i + 1], **options)
        outputs.append(o)
        states.append(s)
    return torch.cat(outputs, dim=1), torch.cat(states)
