"""RMSNorm, and the gated RMSNorm on KDA's output. No mean is subtracted, no weight is 1 + w."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from .fused_kernel import FusedKernel
from .precision import Float32Parameters, at_least_fp32, row_blocks, storage_fp32, upcast


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension, in at least float32."""
    x = upcast(x)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _norm_and_scale(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """n = x r and r = 1 / sqrt(mean(x^2) + eps), in at least float32."""
    wide = upcast(x)
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * r, r


def _through_norm(dn: Tensor, n: Tensor, r: Tensor) -> Tensor:
    """r (dn - n mean(n dn)), in the memory of dn."""
    return dn.addcmul_(n, (n * dn).mean(-1, keepdim=True), value=-1).mul_(r)


class _RMSNorm(torch.autograd.Function):
    """The norm with a backward of its own: it keeps x in its dtype, nothing wide, and forms the rest again.

    With n = x r:  dn = w dy,  dx = r (dn - n mean(n dn)),  dw = sum dy round(n)
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype), memory_format=torch.contiguous_format)
        for part, into in row_blocks(x, y):
            torch.mul(weight, rms_normalize(part, eps).to(x.dtype), out=into)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dw = torch.zeros_like(weight, dtype=at_least_fp32(weight.dtype))
        for part, d, into in row_blocks(x, dy, dx):
            (n, r), d = _norm_and_scale(part, ctx.eps), upcast(d)
            if ctx.needs_input_grad[1]:
                dw += (d * n.to(x.dtype)).sum(0)
            into.copy_(_through_norm(d * weight, n, r))
        return dx, dw.to(weight.dtype), None


class K3RMSNorm(nn.Module):
    """Root mean square norm.

        y = w * round(x / sqrt(mean(x^2) + eps))

    Statistics in at least float32, rounded to the activation dtype, then multiplied by the weight [D].
    Source: released `KimiRMSNorm`.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D], same dtype."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)
        return self.weight * rms_normalize(hidden_states, self.variance_epsilon).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """The equation of `K3RMSNormGated` in torch; the result has the dtype of `gate`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _GatedNorm.apply(x, gate, weight, eps)
    return (rms_normalize(x, eps) * weight * upcast(gate).sigmoid()).to(gate.dtype)


class _GatedNorm(torch.autograd.Function):
    """The gated norm, which likewise keeps its inputs and forms the rest again.

    With n = x r, s = sigmoid(gate):  dn = w s dy,  dx = r (dn - n mean(n dn)),  dw = sum n s dy,
    dgate = dy n w s (1 - s)
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for part, g, into in row_blocks(x, gate, y):
            into.copy_(rms_normalize(part, eps).mul(weight).mul_(upcast(g).sigmoid()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        dx, d_gate = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, gate))
        dw = torch.zeros_like(weight, dtype=at_least_fp32(weight.dtype))
        for part, g, d, into, into_gate in row_blocks(x, gate, dy, dx, d_gate):
            (n, r), s = _norm_and_scale(part, ctx.eps), upcast(g).sigmoid()
            open_d = s * d
            dw += (open_d * n).sum(0)
            dn = open_d.mul_(weight)
            into_gate.copy_((n * dn).mul_(1 - s))
            into.copy_(_through_norm(dn, n, r))
        return dx, d_gate, dw.to(weight.dtype), None


def _call_fla(kernel: Callable[..., Tensor], x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    # The kernel answers in the dtype of x, the recurrence's float32, and rounds nowhere before.
    return kernel(upcast(x), gate, weight, None, activation="sigmoid", eps=eps).to(gate.dtype)


def _example(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(*shape, generator=generator) for shape in ((2, 9, 3, 128), (2, 9, 3, 128), (128,)))
    return x, (3 * gate).to(dtype), weight


#: fla's kernel for the gated norm: one pass instead of five.
FUSED_GATED_NORM = FusedKernel(
    "gated norm",
    "fla.modules.norm.fused_norm_gate:rms_norm_gated",
    ("x", "g", "weight", "bias", "activation", "eps"),
    _call_fla,
    gated_norm,
    _example,
)


class K3RMSNormGated(Float32Parameters):
    """KDA's output norm: one weight of width V shared by all heads, gated by a sigmoid after the norm.

        y = x / sqrt(mean(x^2) + eps) * w * sigmoid(gate)

    All of it in at least float32, one cast at the end; the weight stays float32 in a bf16 model.
    Source: arXiv 2607.24653 eq. 6, released `o_norm`.
    """

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim, dtype=storage_fp32()))
        self.variance_epsilon = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., V] -> [..., V] in the dtype of `gate`, the activation dtype."""
        eps = self.variance_epsilon
        fused = FUSED_GATED_NORM.try_call(gate.dtype, x, gate, self.weight, eps=eps)
        return gated_norm(x, gate, self.weight, eps) if fused is None else fused

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"
