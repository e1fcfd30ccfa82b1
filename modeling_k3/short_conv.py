"""The short convolution of KDA: a few taps per channel, causal, with a window that continues across calls."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from .fused_kernel import FusedKernel
from .precision import Float32Parameters, at_least_fp32, row_blocks, storage_fp32, upcast


def filter_and_silu(x: Tensor, taps: Tensor) -> Tensor:
    """Stream [B, n + W - 1, channels] and taps [channels, W] -> SiLU of the filtered stream [B, n, channels]."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _FilterSiLU.apply(x, taps)
    return F.silu(_filter(upcast(x), taps)).to(x.dtype)


def _filter(wide: Tensor, taps: Tensor) -> Tensor:
    taps, n = taps.to(wide.dtype).mT.contiguous(), wide.shape[-2] - taps.shape[1] + 1
    c = wide[..., :n, :] * taps[0]
    for j in range(1, len(taps)):
        c = torch.addcmul(c, wide[..., j : j + n, :], taps[j])
    return c


class _FilterSiLU(torch.autograd.Function):
    """The filter with a backward of its own: it keeps x in its dtype, nothing wide, and forms the rest again.

    With c_t = sum_j w_j x_{t+j}, s = sigmoid(c):  dc = dy s (1 + c (1 - s)),  dw_j = sum_t dc_t x_{t+j},
    dx_t = sum_j w_j dc_{t-j}
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        return F.silu(_filter(upcast(x), taps)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, taps = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        w = taps.to(at_least_fp32(x.dtype)).mT.contiguous()
        dw = torch.zeros_like(w) if ctx.needs_input_grad[1] else None
        for stream, d, into in zip(x, dy, dx, strict=True):
            begin, spill = 0, w.new_zeros(len(w) - 1, w.shape[1])
            for (part,) in row_blocks(d):
                end = begin + len(part)
                spill = _filter_backward(stream[begin : end + len(spill)], part, w, spill, into[begin:end], dw)
                begin = end
            into[begin:].copy_(spill)
        return dx, None if dw is None else dw.mT.to(taps.dtype)


def _filter_backward(x: Tensor, dy: Tensor, w: Tensor, spill: Tensor, dx: Tensor, dw: Tensor | None) -> Tensor:
    """One block of n tokens: fills dx, adds to dw, returns what belongs to the W - 1 inputs behind the block.

    Args:
        x: [n + W - 1, channels].
        dy, dx: [n, channels].
        w, dw: [W, channels]; no dw for frozen taps.
        spill: [W - 1, channels], what earlier blocks left for the first inputs.
    """
    wide, n = upcast(x), len(dy)
    c = _filter(wide, w.mT)
    s = torch.sigmoid(c)
    dc = torch.addcmul(c, c, s, value=-1).add_(1).mul_(s).mul_(dy)
    total = F.pad(spill, (0, 0, 0, n))
    for j in range(len(w)):
        if dw is not None:
            dw[j] += (dc * wide[j : j + n]).sum(0)
        total[j : j + n].addcmul_(dc, w[j])
    dx.copy_(total[:n])
    return total[n:]


def _call_fla(kernel: Callable[..., tuple[Tensor, None]], x: Tensor, taps: Tensor) -> Tensor:
    # The window stands in front of the stream, so the kernel's own states, and its update in place, are not needed.
    c, _ = kernel(x=x.contiguous(), weight=taps.contiguous(), activation="silu")
    return c[:, taps.shape[1] - 1 :]


def _example(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 70, 40, generator=generator).to(dtype), torch.randn(40, 4, generator=generator)


#: fla's kernel for the short convolution: one pass instead of one per tap.
FUSED_FILTER = FusedKernel(
    "short convolution",
    "fla.modules.causal_conv1d:causal_conv1d",
    ("x", "weight", "activation"),
    _call_fla,
    filter_and_silu,
    _example,
)


class K3ShortConvolution(Float32Parameters):
    """Depthwise causal convolution, then SiLU.

        c_t = SiLU( sum_{j<W} w_j z_{t-(W-1)+j} )        the last tap meets the current token

    Zeros before the first token, no bias. Sums in at least float32, rounded to the activation dtype; the weight
    [channels, 1, W] stays float32 in a bf16 model. Source: released `*_conv1d`.
    """

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, dtype=storage_fp32()))
        self.kernel_size = kernel_size
        nn.init.uniform_(self.weight, -(kernel_size**-0.5), kernel_size**-0.5)

    def forward(self, z: Tensor, window: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve, starting from `window`.

        Args:
            z: [B, T, channels], the projection.
            window: [B, channels, W], the last inputs of earlier calls, newest last; None for none.
            mask: [B, T] bool, False at padding. Padding is skipped, wherever it stands: real tokens see only real
                tokens. None: no padding.

        Returns:
            [B, T, channels] in z's dtype (values at padding mean nothing), and the next window [B, channels, W].
        """
        batch, _, channels = z.shape
        size = self.kernel_size
        window = z.new_zeros(batch, size, channels) if window is None else window.mT.to(z.dtype)
        stream = torch.cat([window, z], dim=1)
        if mask is None:
            c = self._filter(stream[:, 1:])
        else:
            # Padding moves in front of the window, so that the real tokens stand side by side.
            kept = F.pad(mask, (size, 0), value=True)
            order = kept.to(torch.uint8).argsort(dim=1, stable=True)
            stream = stream.masked_fill(~kept.unsqueeze(-1), 0).gather(1, _per_channel(order, channels))
            c = self._filter(F.pad(stream, (0, 0, size - 1, 0)))
            c = c.gather(1, _per_channel(order.argsort(dim=1), channels))[:, size:]
        return c, stream[:, -size:].mT.contiguous()

    def _filter(self, x: Tensor) -> Tensor:
        """[B, n + W - 1, channels] -> [B, n, channels]."""
        taps = self.weight[:, 0]
        fused = FUSED_FILTER.try_call(x.dtype, x, taps)
        return filter_and_silu(x, taps) if fused is None else fused

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kernel_size={self.kernel_size}"


def _per_channel(index: Tensor, channels: int) -> Tensor:
    """[B, n] -> [B, n, channels], for `gather` along the tokens."""
    return index.unsqueeze(-1).expand(-1, -1, channels)
