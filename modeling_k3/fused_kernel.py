"""A kernel of fla in the place of a few torch operations: when it may be called, and that it is right before it is.

Used for what stands around the recurrence, the gated norm and the short convolution. A kernel is called only with a
version and a signature that are known, on a device where it was compared with torch once, forward and gradients.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers.utils import logging

from .kda_check import relative_error
from .kda_fla import SUPPORTED_DEVICES, find_function
from .kda_verdicts import Verdict, read_verdict, verdict_key, write_verdict
from .precision import no_autocast

#: Relative RMS error allowed to the result and to gradients, by the dtype of the activations: a few roundings.
LIMITS = {torch.bfloat16: (5e-3, 1e-2), torch.float16: (1e-3, 2e-3), torch.float32: (2e-6, 5e-6)}

logger = logging.get_logger(__name__)


class FusedKernel:
    """One kernel and what is known of it.

    Args:
        name: for the log, the verdicts and `k3 doctor`.
        place: module and function, "fla.modules.x:function".
        arguments: names that the function must know; fla's functions swallow others in silence.
        call: (kernel, *tensors, **options) -> result, arguments as `plain` takes them.
        plain: the torch form, (*tensors, **options) -> result, in whatever dtype it gets; options have defaults.
        example: dtype -> tensors for the comparison, on the CPU.
    """

    def __init__(
        self,
        name: str,
        place: str,
        arguments: Iterable[str],
        call: Callable[..., Tensor],
        plain: Callable[..., Tensor],
        example: Callable[[torch.dtype], tuple[Tensor, ...]],
    ) -> None:
        self.name, self._place, self._arguments = name, place, frozenset(arguments)
        self._call, self._plain, self._example = call, plain, example
        self._found: Callable[..., object] | str | None = None
        self._left: str | None = None
        self._said: set[torch.dtype] = set()

    def find(self) -> Callable[..., object] | str:
        """Import the kernel, or say why it cannot be used; looked up once."""
        if self._found is None:
            self._found = find_function(self._place, self._arguments)
        return self._found

    def try_call(self, dtype: torch.dtype, *tensors: Tensor, **options: float) -> Tensor | None:
        """Return the result by the kernel, or None where it cannot serve this call; a kernel that fails is left.

        Args:
            dtype: of the activations.
            tensors, options: as the plain form takes them.
        """
        device = tensors[0].device
        # A compiler joins the torch operations by itself, and could not read a verdict.
        if device.type not in SUPPORTED_DEVICES or dtype not in LIMITS or self._left or torch.compiler.is_compiling():
            return None
        try:
            verdict = self.probe(device, dtype)
            if not verdict.passed:
                self._leave(verdict.reason, warn=not isinstance(self.find(), str))
                return None
            result = self._call(self.find(), *tensors, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._leave(f"{type(error).__name__}: {error}", warn=True)
            return None
        if dtype not in self._said:
            self._said.add(dtype)
            logger.info(f"{self.name} runs on fla's kernel ({device.type}, {dtype})")
        return result

    def probe(self, device: torch.device, dtype: torch.dtype, *, again: bool = False) -> Verdict:
        """Return whether the kernel is right on this device, from the stored verdict or by trying."""
        found = self.find()
        if isinstance(found, str):
            return Verdict(False, found)
        key = verdict_key(f"fla {self.name}", device, dtype)
        known = None if again else read_verdict(key)
        if known is not None:
            return known
        # The first call that asks may stand in any of these contexts.
        with torch.inference_mode(False), torch.enable_grad(), no_autocast(device.type):
            tensors = [x.to(device) for x in self._example(dtype)]
            results = _with_gradients(lambda *x: self._call(found, *x), tensors)
            true = _with_gradients(self._plain, [x.double() for x in tensors])
        errors = [relative_error(x, y) for x, y in zip(results, true, strict=True)]
        forward, backward = LIMITS[dtype]
        verdict = Verdict(True, "agrees with float64")
        if not errors[0] <= forward:
            verdict = Verdict(False, f"off by {errors[0]:.1e}, allowed {forward:.0e}")
        elif not max(errors[1:]) <= backward:
            verdict = Verdict(False, f"gradients off by {max(errors[1:]):.1e}, allowed {backward:.0e}")
        write_verdict(key, verdict)
        return verdict

    def reset(self) -> None:
        """Forget what this process found out and said."""
        self._found, self._left = None, None
        self._said.clear()

    def _leave(self, reason: str, *, warn: bool) -> None:
        self._left = reason
        (logger.warning if warn else logger.info)(f"{self.name} runs in plain torch: {reason}")


def _with_gradients(function: Callable[..., Tensor], tensors: Iterable[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    y = function(*leaves)
    # Numbers of bfloat16, so that no form loses them on the way back.
    weights = torch.linspace(-1, 1, y.shape[-1], device=y.device).bfloat16()
    return [y, *torch.autograd.grad(y, leaves, weights.to(y.dtype).expand_as(y).contiguous())]
