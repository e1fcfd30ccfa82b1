"""SiTU-GLU, the bounded SwiGLU, with a backward that keeps its two inputs and nothing else.

    y = b tanh(g / b) sigmoid(g) * c tanh(u / c)

Work goes block by block, so that the wide temporaries stay in the cache. A tanh in float32 is the largest cost on a
CPU; numbers of 16 bits are few, so there both factors and their slopes are looked up: the same bits, several times
sooner.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .precision import at_least_fp32, row_blocks

Curve = Callable[[Tensor, float | None, int], list[Tensor]]

#: From so many elements on looking up beats computing.
_LOOK_UP_FROM = 2**12


def situ(gate: Tensor, up: Tensor, b: float, c: float | None) -> Tensor:
    """Return b tanh(gate / b) sigmoid(gate) times c tanh(up / c), or times `up` without c; see `mlp`."""
    if torch.compiler.is_compiling():
        wide = at_least_fp32(gate.dtype)
        return (_bend_gate(gate.to(wide), b, 1)[0] * _bend_linear(up.to(wide), c, 1)[0]).to(gate.dtype)
    return _SiTU.apply(gate, up, b, c)


class _SiTU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor, b: float, c: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = b, c
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for g, u, out in row_blocks(gate, up, y):
            out.copy_(_evaluate(_bend_gate, g, b)[0].mul_(_evaluate(_bend_linear, u, c)[0]))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up), (b, c) = ctx.saved_tensors, ctx.bounds
        d_gate, d_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
        for g, u, d, into_gate, into_up in row_blocks(gate, up, dy, d_gate, d_up):
            (f, f_slope), (h, h_slope) = _evaluate(_bend_gate, g, b, 2), _evaluate(_bend_linear, u, c, 2)
            into_gate.copy_(h.mul_(d).mul_(f_slope))
            into_up.copy_(f.mul_(d).mul_(h_slope))
        return d_gate, d_up, None, None


def _bend_gate(g: Tensor, b: float, count: int) -> list[Tensor]:
    """b tanh(g / b) sigmoid(g) and, if two are wanted, its slope."""
    t, s = torch.tanh(g / b), torch.sigmoid(g)
    return [b * t * s, ((1 - t * t) + b * t * (1 - s)) * s] if count > 1 else [b * t * s]


def _bend_linear(u: Tensor, c: float | None, count: int) -> list[Tensor]:
    """c tanh(u / c), or u without a bound; its slope."""
    if c is None:
        return [u, torch.ones_like(u)]
    t = torch.tanh(u / c)
    return [c * t, 1 - t * t] if count > 1 else [c * t]


def _evaluate(curve: Curve, x: Tensor, bound: float | None, count: int = 1) -> list[Tensor]:
    """New tensors in at least float32: a curve at x and, with a count of 2, its slope."""
    # A subclass may stand for numbers that are not there.
    if x.device.type == "cpu" and x.itemsize == 2 and x.numel() >= _LOOK_UP_FROM and type(x) is Tensor:
        places = x.view(torch.uint16).to(torch.int64).flatten()
        return [values.index_select(0, places).view(x.shape) for values in _tables(curve, x.dtype, bound)[:count]]
    return curve(x.to(at_least_fp32(x.dtype), copy=True), bound, count)


@functools.lru_cache(maxsize=16)
def _tables(curve: Curve, dtype: torch.dtype, bound: float | None) -> list[Tensor]:
    """A curve and its slope in float32 at every number of a 16-bit dtype, in the order of their bits."""
    with torch.inference_mode(False), torch.no_grad():
        numbers = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.uint16).view(dtype)
        return curve(numbers.float(), bound, 2)
