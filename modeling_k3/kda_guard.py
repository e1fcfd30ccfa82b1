"""A guard for serving: watch the fast form of KDA, and leave it for good when it is wrong.

Every result is looked at for NaN and infinity, every so many calls one is compared with the exact form. The first one
that is wrong, or a path that raises, makes one logged switch to the exact form, for all layers under the guard and
until `reset`; the affected call itself is computed again exactly, so that nothing wrong leaves the layer. Both forms
hold the same state, so a request goes on where it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .kda_ops import exact_kda
from .kda_paths import run_kda

logger = logging.get_logger(__name__)


@dataclass
class KDAGuard:
    """One guard, shared by the layers of a model.

    Args:
        sample_every: compare call 1, 1 + sample_every, .. with the exact form; 0 for never. A comparison costs about
            T^2 per head.
        bound: relative RMS error of output or state above which a sample trips the guard. A few times 1e-5 fits
            float32, 0.01 a bfloat16 kernel.
        run: the path that is watched, as `kda_paths.run_kda`.

    Attributes:
        calls, samples, recomputed: counters since the last reset.
        worst: the largest error of a sample so far.
        reason: why the guard switched, None as long as it has not.
    """

    sample_every: int = 256
    bound: float = 1e-2
    run: Callable[..., tuple[Tensor, Tensor]] = run_kda
    calls: int = 0
    samples: int = 0
    recomputed: int = 0
    worst: float = 0.0
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.sample_every < 0:
            raise ValueError(f"sample_every={self.sample_every} is not allowed: 0 for never, or a positive number")
        if not self.bound > 0:
            raise ValueError(f"bound={self.bound} is not allowed: a relative error above 0")

    def reset(self) -> None:
        """Trust the fast path again and count from 0."""
        self.calls = self.samples = self.recomputed = 0
        self.worst, self.reason = 0.0, None

    def __call__(
        self, implementation: str, *inputs: Tensor | None, lower_bound: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Evaluate KDA under watch; arguments and results as in `kda_paths.run_kda`, without packing."""
        self.calls += 1
        if self.reason is not None or implementation == "exact":
            return exact_kda(*inputs)
        try:
            found = self.run(implementation, *inputs, lower_bound=lower_bound)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return self._switch(f"it raised {type(error).__name__}: {error}", exact_kda(*inputs))
        if not _finite(found):
            exact = exact_kda(*inputs)
            # Where the exact form has no number either, the inputs are at fault.
            return self._switch("it returned NaN or infinity", exact) if _finite(exact) else found
        if self.sample_every and (self.calls - 1) % self.sample_every == 0:
            exact = exact_kda(*inputs)
            self.samples += 1
            error = max(_relative(x, y) for x, y in zip(found, exact, strict=True))
            self.worst = max(self.worst, error)
            if not error <= self.bound:
                return self._switch(f"it is off by {error:.1e}, allowed {self.bound:.1e}", exact)
        return found

    def _switch(self, reason: str, exact: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.reason, self.recomputed = reason, self.recomputed + 1
        logger.warning(
            f"KDA guard: call {self.calls} of the fast path is wrong ({reason}); this call was computed again and all "
            "further ones use the exact form"
        )
        return exact


def set_kda_guard(model: nn.Module, guard: KDAGuard | None) -> KDAGuard | None:
    """Put all KDA layers of `model` under `guard`, or under none; returns it.

    A choice of the moment, not saved. For serving: with gradients a comparison would enter the graph.

    Raises:
        ValueError: the model has no KDA layer.
    """
    layers = [module for module in model.modules() if hasattr(module, "kda_guard")]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no KDA layer to guard")
    for layer in layers:
        layer.kda_guard = guard
    return guard


def _finite(results: tuple[Tensor, Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in results)


def _relative(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm().clamp_min(1e-30)).item()
