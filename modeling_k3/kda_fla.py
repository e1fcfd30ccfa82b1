"""fla's KDA kernels behind the contract of `kda_ops`: when they may be called, and how.

fla's versions swallow arguments they do not know, and some of its kernels have been wrong on some machines. So a call
is made only with a version and signatures that are known, and never in a window that is known to be bad.
"""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kda_ops import SAFE_LOWER_BOUND

#: Where the kernels run. Under Triton's interpreter, in a test, also "cpu".
SUPPORTED_DEVICES = ["cuda"]
#: The first version that knows every argument below and does not drop it in silence.
OLDEST_VERSION = (0, 5, 1)
#: Triton versions whose gated backward is wrong on Hopper: from the first up to, not including, the second.
_BAD_HOPPER_BACKWARD = ((3, 4, 0), (3, 7, 1))
_WIDEST_KEY = 256
#: Up to this many tokens the kernel that walks token by token is the faster one; it has no backward.
_RECURRENT_UP_TO = 16
_ARGUMENTS = {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens"}


@dataclass(frozen=True)
class Kernels:
    """What was found of fla."""

    version: str
    triton: tuple[int, ...]
    chunk: Callable[..., tuple[Tensor, Tensor]]
    recurrent: Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def find_kernels() -> Kernels | str:
    """Import fla's kernels, or say why they cannot be used. Imported only when a tensor could use them."""
    found = []
    for name, extra in (("chunk_kda", {"safe_gate"}), ("fused_recurrent_kda", set())):
        function = find_function(f"fla.ops.kda:{name}", _ARGUMENTS | extra)
        if isinstance(function, str):
            return function
        found.append(function)
    version = _installed("fla-core", "flash-linear-attention")
    return Kernels(version, numbers(_installed("triton")), *found)


def refusal(q: Tensor, lower_bound: float | None, needs_grad: bool, dtype: torch.dtype) -> str | None:
    """Say why fla cannot serve this call; None if it can.

    Args:
        q: [B, T, H, K].
        lower_bound: of the log decay, or None.
        needs_grad: whether a backward may follow.
        dtype: of the activations.
    """
    if q.device.type not in SUPPORTED_DEVICES:
        return f"tensors are on {q.device.type}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"{dtype} does not hold what the kernels form"
    if q.shape[-1] > _WIDEST_KEY:
        return f"key dim {q.shape[-1]} is above {_WIDEST_KEY}"
    if lower_bound is not None and not SAFE_LOWER_BOUND <= lower_bound < 0:
        return f"lower bound {lower_bound} is outside [{SAFE_LOWER_BOUND}, 0)"
    kernels = find_kernels()
    if isinstance(kernels, str):
        return kernels
    first, fixed = _BAD_HOPPER_BACKWARD
    if needs_grad and is_hopper(q.device) and first <= kernels.triton < fixed:
        return f"the gated backward is wrong on Hopper with triton {'.'.join(map(str, kernels.triton))}"
    return None


def fla_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run fla's kernel for this call; arguments and results as in `kda_ops.chunk_kda`.

    Products are taken in the dtype of v (bfloat16, or float32, which a GPU may round to TF32); decay, beta and state
    stay in float32.

    Raises:
        ImportError: the kernels cannot be used; see `refusal` for the other reasons not to call this.
    """
    kernels = find_kernels()
    if isinstance(kernels, str):
        raise ImportError(kernels)
    tensors = (q, k, v, log_decay, beta, *([] if state is None else [state]))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    dtype = v.dtype if v.dtype == torch.bfloat16 else torch.float32
    options: dict[str, object] = {
        "scale": q.shape[-1] ** -0.5,
        # A clone: one of the kernels may write the final state over the initial one.
        "initial_state": None if state is None else state.float().clone(memory_format=torch.contiguous_format),
        "output_final_state": True,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long(),
    }
    kernel = kernels.recurrent
    if needs_grad or q.shape[1] > _RECURRENT_UP_TO:
        kernel, options["safe_gate"] = kernels.chunk, lower_bound is not None
    streams = (x.to(dtype).contiguous() for x in (q, k, v))
    o, final = kernel(*streams, log_decay.float().contiguous(), beta.float().contiguous(), **options)
    return o.float(), final.float()


def find_function(place: str, arguments: Collection[str]) -> Callable[..., Any] | str:
    """Import one function of fla, or say why it cannot be used: missing, too old, or without an argument.

    Args:
        place: module and name, "fla.modules.x:function".
        arguments: names that it must know.
    """
    module, _, name = place.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"fla's kernels cannot be imported ({type(error).__name__}: {error})"
    version = _installed("fla-core", "flash-linear-attention")
    if numbers(version) < OLDEST_VERSION:
        return f"fla {version or 'of unknown version'} is older than {'.'.join(map(str, OLDEST_VERSION))}"
    missing = sorted(set(arguments) - set(inspect.signature(function).parameters))
    return f"fla {version}: {name} does not know {missing}" if missing else function


def is_hopper(device: torch.device) -> bool:
    """Whether `device` is a Hopper GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, () if there are none: "3.7.1+git" is (3, 7, 1)."""
    found: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


def _installed(*names: str) -> str:
    """The version of the first of these distributions that is installed, or ""."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
