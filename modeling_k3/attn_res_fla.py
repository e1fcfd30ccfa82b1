"""fla's fused kernel for the mixture over depth: one read of the sources instead of two; when it may be called.

Only where no gradient is needed: the kernel's weights over depth carry none, and a loss on them would lose its own in
silence. The kernel is tried once on each device and dtype before it is trusted, like those of KDA.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.utils import logging

from .kda_check import relative_error
from .kda_fla import SUPPORTED_DEVICES, find_function
from .kda_verdicts import Verdict, read_verdict, verdict_key, write_verdict

_ARGUMENTS = {"query", "residuals", "rms_weight", "rms_eps", "return_weights"}
#: Relative RMS error allowed to h against float64: a last rounding, and a few in float32.
_LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-6}

logger = logging.get_logger(__name__)
_left: dict[str, str] = {}


@functools.cache
def find_fused_mix() -> Callable[..., tuple[Tensor, Tensor]] | str:
    """Import the kernel, or say why it cannot be used."""
    return find_function("fla.ops.attnres:fused_attnres", _ARGUMENTS)


def try_fused_mix(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float
) -> tuple[Tensor, Tensor] | None:
    """Return what `attn_res.mix_residuals` returns, by the fused kernel; None where it cannot serve this call.

    A kernel that raises or fails the trial is left for the rest of the process, with one warning.
    """
    x = sources[-1]
    if x.device.type not in SUPPORTED_DEVICES or x.dtype not in _LIMITS or "fla" in _left:
        return None
    tensors = (*sources, query, key_gain)
    if any(source.dtype != x.dtype for source in sources) or (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    ):
        return None
    try:
        verdict = probe_fused_mix(x.device, x.dtype)
        if verdict.passed:
            return _call(sources, query, key_gain, eps)
        _leave(verdict.reason)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _leave(f"{type(error).__name__}: {error}", warn=True)
    return None


def probe_fused_mix(device: torch.device, dtype: torch.dtype, *, again: bool = False) -> Verdict:
    """Return whether the kernel is right on this device, from the stored verdict or by trying."""
    found = find_fused_mix()
    if isinstance(found, str):
        return Verdict(False, found)
    key = verdict_key("fla attnres", device, dtype)
    known = None if again else read_verdict(key)
    if known is not None:
        return known
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(3, 7, 256, generator=generator).to(device, dtype) for _ in range(5)]
    query, gain = (torch.randn(256, generator=generator).to(device, dtype) for _ in range(2))
    with torch.no_grad():
        h, p = _call(sources, query, gain, 1e-5)
    values = torch.stack([source.double() for source in sources])
    keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5) * gain.double()
    true_p = (keys @ query.double()).softmax(0)
    true_h = (true_p.unsqueeze(-1) * values).sum(0)
    errors = [relative_error(h, true_h), relative_error(p, true_p.movedim(0, -1))]
    passed = max(errors) <= _LIMITS[dtype]
    verdict = Verdict(passed, "agrees with float64" if passed else f"off by {max(errors):.1e}")
    write_verdict(key, verdict)
    return verdict


def reset_fused_mix() -> None:
    """Forget that the kernel was left in this process."""
    _left.clear()


def _call(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kernel = find_fused_mix()
    if isinstance(kernel, str):
        raise ImportError(kernel)
    sources = [source.contiguous() for source in sources]
    h, p = kernel(query, sources, key_gain, rms_eps=eps, return_weights=True)
    return h, p.float().movedim(0, -1)


def _leave(reason: str, *, warn: bool = False) -> None:
    _left["fla"] = reason
    (logger.warning if warn else logger.info)(f"AttnRes mixes in plain torch: {reason}")
