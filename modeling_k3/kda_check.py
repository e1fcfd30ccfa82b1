"""Is a form of KDA right? Any path against the recurrence in float64: outputs, state, gradients and causality.

Random inputs flatter a kernel: keys are nearly orthogonal and decays forget everything within a few tokens. The cases
here also hold what trained models do: decays near 1 beside strong ones, nearly parallel keys written at full strength.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .kda_ops import recurrent_kda

Path = Callable[..., tuple[Tensor, Tensor]]

#: Relative RMS error allowed: of outputs and state; of gradients of q, k, v; of those of log decay and beta. For
#: bfloat16 the bounds of fla's own tests; for float32 several times what the forms in this package cost.
LIMITS = {torch.float32: (2e-5, 1e-4, 2e-4), torch.bfloat16: (5e-3, 8e-3, 2e-2)}
#: What is compared, in the order of computation, and which of the three limits it has.
_LIMIT_OF = {"o": 0, "state": 0, "dq": 1, "dk": 1, "dv": 1, "dlog_decay": 2, "dbeta": 2, "dstate": 1}
GATES = ("released", "mixed", "parallel keys", "at the bound", "softplus")


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison: q, k, v, log_decay, beta, state, and what is promised of the decays."""

    gate: str
    length: int
    dtype: torch.dtype
    inputs: tuple[Tensor, ...]
    lower_bound: float | None


@dataclass
class Finding:
    """What a comparison found: errors by name, and what is wrong with them."""

    gate: str
    length: int
    dtype: str
    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def make_case(
    gate: str, length: int, dtype: torch.dtype, device: str = "cpu", heads: int = 2, width: int = 64, seed: int = 0
) -> Case:
    """Make seeded inputs, B = 1 and K = V = `width`; `gate` is one of `GATES`."""
    generator = torch.Generator().manual_seed(seed + length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v, z = (normal(1, length, heads, width) for _ in range(4))
    beta = (2 * normal(1, length, heads)).sigmoid()
    if gate == "released":
        # Most channels remember for hundreds of tokens, some forget within a few.
        log_decay = -5 * torch.sigmoid(z + normal(1, 1, heads, width) * 2 - 4)
    elif gate == "at the bound":
        log_decay = torch.full_like(z, -5.0)
    elif gate == "softplus":
        log_decay = -6 * F.softplus(2 * z)
    elif gate == "parallel keys":
        k, log_decay, beta = normal(1, 1, heads, width) + 0.1 * k, -0.01 * z.sigmoid(), 0.9 + 0.1 * beta
    elif gate == "mixed":
        log_decay = -5 * torch.sigmoid(4 * z)
    else:
        raise ValueError(f"gate={gate!r} is unknown; allowed are {list(GATES)}")
    q, k = (F.normalize(x, dim=-1).to(dtype) for x in (q, k))
    state = 0.5 * normal(1, heads, width, width)
    inputs = tuple(x.to(device) for x in (q, k, v.to(dtype), log_decay, beta, state))
    return Case(gate, length, dtype, inputs, None if gate == "softplus" else -5.0)


def compare(path: Path, case: Case, *, gradients: bool = True) -> Finding:
    """Compare `path(q, k, v, log_decay, beta, state, lower_bound=..)` with the recurrence in float64."""
    finding = Finding(case.gate, case.length, str(case.dtype).removeprefix("torch."))

    def options(path: Path) -> dict[str, float | None]:
        return {} if path is recurrent_kda else {"lower_bound": case.lower_bound}

    def evaluate(path: Path, inputs: Sequence[Tensor]) -> list[Tensor]:
        if not gradients:
            return list(path(*inputs, **options(path)))
        leaves = [x.detach().requires_grad_() for x in inputs]
        o, state = path(*leaves, **options(path))
        # Numbers of bfloat16, so that no path loses them on the way back.
        weights = torch.linspace(-1, 1, o.shape[-1], device=o.device).bfloat16().double()
        target = (o.double() * weights).sum() + (state.double() * weights).sum()
        return [o, state, *torch.autograd.grad(target, leaves)]

    truth = evaluate(recurrent_kda, [x.double() for x in case.inputs])
    for name, found, true in zip(_LIMIT_OF, evaluate(path, case.inputs), truth, strict=False):
        error = relative_error(found, true)
        finding.errors[name] = error
        limit = LIMITS[case.dtype][_LIMIT_OF[name]]
        if not error <= limit:
            finding.failures.append(f"{name} is off by {error:.1e} of its size, allowed {limit:.0e}")
    leak = _leak(path, case, options(path))
    if leak is not None:
        finding.failures.append(f"outputs up to token {leak} change with what follows")
    return finding


def relative_error(found: Tensor, true: Tensor) -> float:
    """Relative RMS error; infinite where something is not finite."""
    if found.shape != true.shape or not found.isfinite().all():
        return float("inf")
    return ((found.double() - true).norm() / true.norm().clamp_min(1e-30)).item()


def _leak(path: Path, case: Case, options: dict[str, float | None]) -> int | None:
    """Return a token whose output depends on later tokens, or None."""
    with torch.no_grad():
        before, _ = path(*case.inputs, **options)
        for t in sorted({0, 15, 16, 63, 64, case.length // 2}):
            if t + 1 >= case.length:
                continue
            changed = [x.clone() for x in case.inputs]
            for x in changed[:5]:
                x[:, t + 1 :] = x[:, t + 1 :].flip(1) * 0.5
            after, _ = path(*changed, **options)
            if not torch.equal(before[:, : t + 1], after[:, : t + 1]):
                return t
    return None


def check_path(
    path: Path,
    dtypes: Sequence[torch.dtype],
    lengths: Sequence[int],
    device: str = "cpu",
    *,
    gates: Sequence[str] = GATES,
    gradients: bool = True,
    width: int = 64,
) -> Iterator[Finding]:
    """Compare over dtype x length x gate; a path that raises fails that case, running out of memory is raised."""
    for dtype in dtypes:
        for length in lengths:
            for gate in gates:
                case = make_case(gate, length, dtype, device, width=width)
                try:
                    yield compare(path, case, gradients=gradients)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    name = str(dtype).removeprefix("torch.")
                    yield Finding(gate, length, name, failures=[f"{type(error).__name__}: {str(error)[:200]}"])
