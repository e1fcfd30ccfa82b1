"""Dense experts group by group: tokens sorted by expert once, then products on slices.

    h_i = W1_e(i) z_t(i)            one row i for each chosen expert of each token
    s_t = sum_i p_i W2_e(i) a_i

Gradients of the stacks are written where they belong, and neither the sorted tokens nor the experts' outputs are kept:
the weight's gradient needs no output,

    dp_i = < ds_t, W2 a_i > = < W2^T ds_t, a_i >
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .gradient_memory import gradient_like
from .precision import at_least_fp32, no_autocast

#: Rows that are made wide at a time, so that the wide copy stays in the cache.
_ROWS = 128


def combine_groups(
    z: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the weighted sum over each token's experts, [tokens, E] in z's dtype; see `experts.K3Experts`.

    Args:
        z: [tokens, E].
        top_k_index: [tokens, R]; numbers from N upwards belong to another rank and add nothing.
        top_k_weights: [tokens, R].
        gate_up, down: [N, 2F, E] and [N, E, F].
        activate: [rows, 2F] -> [rows, F].
    """
    device = z.device.type
    if torch.is_autocast_enabled(device):
        z, gate_up, down = (x.to(torch.get_autocast_dtype(device)) for x in (z, gate_up, down))
    chosen = top_k_index.flatten()
    counts = torch.bincount(chosen, minlength=len(down))[: len(down)].tolist()
    order = chosen.argsort(stable=True)[: sum(counts)]
    token = order // top_k_index.shape[1]
    with no_autocast(device):
        a = activate(_Enter.apply(z, gate_up, token, counts))
        weights = top_k_weights.flatten().index_select(0, order).unsqueeze(1)
        return _Leave.apply(a, weights, down, token, counts, len(z))


class _Enter(torch.autograd.Function):
    """Rows W1_e z_t, sorted by expert."""

    @staticmethod
    def forward(ctx: FunctionCtx, z: Tensor, stack: Tensor, token: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(z, stack, token)
        ctx.counts = counts
        return _products(z.index_select(0, token), stack.mT, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dh: Tensor) -> tuple[Tensor | None, ...]:
        z, stack, token = ctx.saved_tensors
        dz = d_stack = None
        with no_autocast(dh.device.type):
            if ctx.needs_input_grad[0]:
                dz = _sum_rows(_products(dh, stack, ctx.counts), token, len(z))
            if ctx.needs_input_grad[1]:
                d_stack = _outer_products(dh, z.index_select(0, token), stack, ctx.counts)
        return dz, d_stack, None, None


class _Leave(torch.autograd.Function):
    """Sums of p_i W2_e a_i over the rows of each token."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, a: Tensor, weights: Tensor, stack: Tensor, token: Tensor, counts: Sequence[int], tokens: int
    ) -> Tensor:
        ctx.save_for_backward(a, weights, stack, token)
        ctx.counts = counts
        return _sum_rows(_products(a, stack.mT, counts), token, tokens, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, ds: Tensor) -> tuple[Tensor | None, ...]:
        a, weights, stack, token = ctx.saved_tensors
        d_stack = None
        with no_autocast(ds.device.type):
            ds = ds.index_select(0, token)
            da, d_weights = _products(ds, stack, ctx.counts), torch.empty_like(weights)
            for p, value, back, dp, d in zip(*(x.split(_ROWS) for x in (weights, a, da, d_weights, ds)), strict=True):
                wide = back.to(weights.dtype)
                torch.sum(wide * value, dim=1, keepdim=True, out=dp)
                back.copy_(wide.mul_(p))
                d.copy_(d * p)
            if ctx.needs_input_grad[2]:
                d_stack = _outer_products(ds, a, stack, ctx.counts)
        return da, d_weights, d_stack, None, None, None


def _products(rows: Tensor, stack: Tensor, counts: Sequence[int]) -> Tensor:
    """[rows, in] x [N, in, out] -> [rows, out], each group of rows by its own matrix."""
    y = rows.new_empty(len(rows), stack.shape[2])
    for group, into, matrix in zip(rows.split(counts), y.split(counts), stack.unbind(0), strict=True):
        if len(group):
            torch.mm(group, matrix, out=into)
    return y


def _outer_products(left: Tensor, right: Tensor, like: Tensor, counts: Sequence[int]) -> Tensor:
    """Sums of left_i right_i^T over each group, [N, out, in]; zero for a group without rows."""
    stack = gradient_like(like)
    for x, y, into in zip(left.split(counts), right.split(counts), stack.unbind(0), strict=True):
        torch.mm(x.mT, y, out=into) if len(x) else into.zero_()
    return stack


def _sum_rows(rows: Tensor, token: Tensor, tokens: int, weights: Tensor | None = None) -> Tensor:
    """Add (weighted) rows up token by token, [tokens, width], in at least float32; one cast to the dtype of `rows`."""
    total = rows.new_zeros(tokens, rows.shape[1], dtype=at_least_fp32(rows.dtype))
    weights = total.new_ones(len(rows), 1) if weights is None else weights
    for part, place, weight in zip(*(x.split(_ROWS) for x in (rows, token, weights)), strict=True):
        total.index_add_(0, place, part * weight)
    return total.to(rows.dtype)
