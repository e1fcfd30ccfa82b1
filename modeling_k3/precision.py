"""Which arithmetic is never done below float32, and which parameters are never stored below it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

#: Name patterns of the parameters that stay float32 in a bf16 or fp16 model, as in the release.
KEEP_IN_FP32 = ("A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "e_score_correction_bias")


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums, gates, routing and state: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def upcast(tensor: Tensor) -> Tensor:
    """Return `tensor` in at least float32 (itself where it already is)."""
    return tensor.to(at_least_fp32(tensor.dtype))


class Float32Parameters(nn.Module):
    """Mixin: `.half()`, `.bfloat16()` and `.to(dtype)` leave this module's listed parameters at float32.

    Casting a whole model down would round decays and routing biases whose low bits decide; widening (`.double()`)
    and device moves work as usual. `float32_parameters` names own parameters of the class, children are not affected.
    """

    float32_parameters: tuple[str, ...] = ("weight",)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        kept = [self._parameters[name] for name in self.float32_parameters]
        kept += [parameter.grad for parameter in kept if parameter is not None and parameter.grad is not None]

        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = moved.is_floating_point() and moved.element_size() < tensor.element_size()
            if narrowed and tensor.dtype == torch.float32 and any(tensor is parameter for parameter in kept):
                return tensor.to(moved.device)
            return moved

        return super()._apply(keep_wide, recurse=False)
