"""One slab of KDA chunks: what the chunk form computes before it meets the incoming state. See `kda_chunk`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 16
#: Below this log decay per token the factors of P leave float32.
SAFE_LOWER_BOUND = -5.0
#: About e^40, and exact.
LIFT = 2.0**58


class Buffers:
    """Memory by name, allocated once and handed out again: the contents are whatever was there."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._held = like, {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a contiguous tensor of `shape`; the one taken before under `name` is void from now on."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = self._like.new_empty(size)
        return held[:size].view(shape)


@dataclass
class Slab:
    """A few chunks of a few rows: everything that does not depend on the incoming state."""

    q: Tensor  # q, k, v: views of the inputs as tiles [n, b, h, 16, ..]
    k: Tensor
    v: Tensor
    beta: Tensor  # [n, rows, 16, 1]
    step: Tensor | None  # e^l [n, b, h, 16, K]; None with a bound
    g: Tensor  # [n, b, h, 16, K]
    whole: Tensor  # g_C [n, rows, K, 1]
    x: Tensor  # [n, rows, 32, K]
    k_in: Tensor | None  # k / (g LIFT) [n, b, h, 16, K]; None without a bound
    k_out: Tensor  # k g_C / g [n, rows, 16, K]
    write: Tensor  # StrictTril(P_1) [n, rows, 16, 16]
    read: Tensor  # Tril(P_2)
    inverse: Tensor  # (I + L)^-1
    solve: Tensor  # (I + L)^-1 Diag(beta)


def prepare(tiles: list[Tensor], bounded: bool, buffers: Buffers) -> Slab:
    """Form a slab from tiles [n, b, h, 16, ..] of q, k, v, log decay and beta."""
    q, k, v, log_decay, beta = tiles
    n, b, h, _, width = k.shape
    step, g = (None, _bounded_decay(log_decay, buffers)) if bounded else _free_decay(log_decay, buffers)
    x = buffers.take("x", n, b, h, 2 * CHUNK, width)
    torch.mul(k, g, out=x[..., :CHUNK, :])
    torch.mul(q, g, out=x[..., CHUNK:, :])
    k_out = buffers.take("k_out", n, b, h, CHUNK, width)
    p = buffers.take("p", n, b, h, 2 * CHUNK, CHUNK)
    k_in = None
    if bounded:
        k_in = buffers.take("k_in", n, b, h, CHUNK, width)
        torch.addcdiv(g.new_zeros(()), k, g, value=1 / LIFT, out=k_in)
        torch.mul(k_in, g[..., -1:, :] * LIFT, out=k_out)
        torch.bmm(as_batch(x), as_batch(k_in).mT, out=as_batch(p))
        p.mul_(LIFT)
    else:
        rows = p.unflatten(-2, (2, CHUNK))
        for i, keys in decayed_keys(k, step, k_out):
            rows[..., i, : i + 1] = torch.stack([k[..., i, :], q[..., i, :]], dim=-2) @ keys.mT
    write, read = p[..., :CHUNK, :].flatten(1, 2).tril(-1), p[..., CHUNK:, :].flatten(1, 2).tril()
    beta = beta.reshape(n, b * h, CHUNK, 1)
    inverse = torch.empty_like(write)
    eye = torch.eye(CHUNK, dtype=g.dtype, device=g.device).expand_as(write)
    torch.linalg.solve_triangular(write * beta, eye, upper=False, unitriangular=True, out=inverse)
    whole = g[..., -1, :].reshape(n, b * h, width, 1)
    x, k_out = x.flatten(1, 2), k_out.flatten(1, 2)
    return Slab(q, k, v, beta, step, g, whole, x, k_in, k_out, write, read, inverse, inverse * beta.mT)


def _bounded_decay(log_decay: Tensor, buffers: Buffers) -> Tensor:
    """g [n, b, h, 16, K]: sums from the start of each chunk as products with a triangle of ones, then exp."""
    n, b, h, _, width = log_decay.shape
    ones = log_decay.new_ones(CHUNK, CHUNK).tril()
    sums = buffers.take("g", b * n, CHUNK, h * width)
    torch.bmm(ones.expand(b * n, -1, -1), log_decay.permute(1, 0, 3, 2, 4).reshape(b * n, CHUNK, h * width), out=sums)
    return sums.exp_().view(b, n, CHUNK, h, width).permute(1, 0, 3, 2, 4)


def _free_decay(log_decay: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
    """e^l and its running product g, both [n, b, h, 16, K]. A sum of logs that passes -1e4 forgets small ones."""
    step = torch.exp(log_decay, out=buffers.take("step", *log_decay.shape))
    g = buffers.take("g", *log_decay.shape)
    g[..., 0, :] = step[..., 0, :]
    for i in range(1, CHUNK):
        torch.mul(g[..., i - 1, :], step[..., i, :], out=g[..., i, :])
    return step, g


def decayed_keys(k: Tensor, step: Tensor, out: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield i and k_j decayed to token i for j <= i, [.., i + 1, K], in the memory of `out`: no factor exceeds 1."""
    for i in range(CHUNK):
        out[..., :i, :] *= step[..., i : i + 1, :]
        out[..., i, :] = k[..., i, :]
        yield i, out[..., : i + 1, :]


def as_batch(x: Tensor) -> Tensor:
    """[.., i, j] -> [batch, i, j] without copying."""
    return x.view(-1, *x.shape[-2:]) if x.is_contiguous() else x.flatten(0, -3)
