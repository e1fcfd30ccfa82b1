"""Which arithmetic is never done below float32, and which parameters are never stored below it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

#: Name patterns of the parameters that stay float32 in a bf16 or fp16 model, as in the release.
KEEP_IN_FP32 = ("A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "e_score_correction_bias")

#: Elements of a block.
_BLOCK = 2**16


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums, gates, routing and state: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def storage_fp32() -> torch.dtype:
    """Return the dtype in which parameters of the list are created: at least float32, whatever the default is."""
    return at_least_fp32(torch.get_default_dtype())


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
        kept = [self._parameters.get(name) for name in self.float32_parameters]
        kept += [parameter.grad for parameter in kept if parameter is not None and parameter.grad is not None]

        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not any(tensor is parameter for parameter in kept) or not moved.is_floating_point():
                return moved
            wide = at_least_fp32(moved.dtype)
            return moved if moved.dtype == wide else tensor.to(moved.device, wide)

        return super()._apply(keep_wide, recurse=False)


def no_autocast(device_type: str) -> AbstractContextManager[None]:
    """Keep autocast out of a computation that must stay wide: inside it, matrix products would become bf16."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk tensors [.., D_i] together as blocks [rows, D_i], whose wide temporaries stay in a CPU's cache.

    The first tensor is the widest and sets the number of rows. Elsewhere all rows are one block: a launch costs more.
    """
    flat = [x.reshape(-1, max(1, x.shape[-1]) if x.dim() else 1) for x in tensors]
    rows = _BLOCK // flat[0].shape[1] if flat[0].device.type == "cpu" else len(flat[0])
    return zip(*(x.split(max(1, rows)) for x in flat), strict=True)
