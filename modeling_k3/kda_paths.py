"""Which form of KDA evaluates a call. The one place that decides, says so once in the log, and falls back.

recurrent   the definition; decode steps on a CPU
chunk       matrix products in plain torch; right everywhere
exact       the attention-matrix form
fla         kernels on a GPU, where this call, version and machine allow it and a probe has found them right
auto        fla if possible, else recurrent for a few tokens, else chunk
"""

import torch
from torch import Tensor
from transformers.utils import logging

from .kda_check import check_path
from .kda_fla import fla_kda, refusal
from .kda_ops import chunk_kda, exact_kda, recurrent_kda
from .kda_verdicts import Verdict, read_verdict, verdict_key, write_verdict
from .precision import no_autocast

#: How the recurrence is evaluated: a choice of the moment, never saved. All are the same function up to rounding.
KDA_IMPLEMENTATIONS = ("auto", "chunk", "recurrent", "exact", "fla")
#: Up to this many tokens the recurrence beats a chunk that is mostly padding.
_RECURRENT_UP_TO = 4

logger = logging.get_logger(__name__)
_said: set[str] = set()
_raised: dict[str, str] = {}


def check_kda_implementation(name: str) -> str:
    """Return `name` if it is an implementation of KDA.

    Raises:
        ValueError: it is not; names what is allowed.
    """
    if name not in KDA_IMPLEMENTATIONS:
        raise ValueError(f"kda_implementation={name!r} is unknown; allowed are {list(KDA_IMPLEMENTATIONS)}")
    return name


def choose(implementation: str, q: Tensor, dtype: torch.dtype, lower_bound: float | None, needs_grad: bool) -> str:
    """Return the path for a call, "chunk", "recurrent", "exact" or "fla"; one log line for each new reason.

    Args:
        implementation: one of `KDA_IMPLEMENTATIONS`.
        q: [B, T, H, K].
        dtype: of the activations. "auto" leaves float32 models to torch: the kernels may round products to TF32.
        lower_bound, needs_grad: see `kda_fla.refusal`.
    """
    if implementation in ("chunk", "recurrent", "exact"):
        return implementation
    why_not = _raised.get("fla") or refusal(q, lower_bound, needs_grad, dtype)
    if why_not is None and implementation == "auto":
        why_not = _distrust(q, dtype)
    if why_not is None:
        _say_once(f"KDA runs on fla's kernels ({q.device.type}, {dtype})")
        return "fla"
    path = "recurrent" if q.shape[1] <= _RECURRENT_UP_TO and q.device.type == "cpu" else "chunk"
    if implementation == "fla":
        _say_once(f"kda_implementation='fla' is not possible: {why_not}; plain torch is used", warn=True)
    elif path == "chunk":
        _say_once(f"KDA runs in chunks in plain torch: {why_not}")
    return path


def run_kda(
    implementation: str,
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
    """Evaluate KDA by the path that `choose` names; arguments and results as in `kda_ops`.

    A kernel that raises is not called again in this process; the call is done in torch, with one warning.
    """
    inputs = (q, k, v, log_decay, beta, state)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    path = choose(implementation, q, v.dtype, lower_bound, needs_grad)
    if path == "fla":
        try:
            return fla_kda(*inputs, cu_seqlens=cu_seqlens, lower_bound=lower_bound)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _raised["fla"] = f"{type(error).__name__}: {error}"
            _say_once(f"fla's KDA kernel failed ({_raised['fla']}); plain torch is used from now on", warn=True)
            path = "chunk"
    if path == "exact":
        return exact_kda(*inputs, cu_seqlens=cu_seqlens)
    if path == "recurrent":
        return recurrent_kda(*inputs, cu_seqlens=cu_seqlens)
    return chunk_kda(*inputs, cu_seqlens=cu_seqlens, lower_bound=lower_bound)


def probe_fla(device: torch.device, dtype: torch.dtype, *, again: bool = False) -> Verdict:
    """Return whether fla's kernels are right on this device, from the stored verdict or by trying (seconds, once)."""
    key = verdict_key("fla", device, dtype)
    known = None if again else read_verdict(key)
    if known is not None:
        return known
    # The first call that asks may stand in any of these contexts; the trial needs gradients and full precision.
    with torch.inference_mode(False), torch.enable_grad(), no_autocast(device.type):
        findings = list(check_path(fla_kda, [dtype], [1, 65, 200], str(device)))
    failures = [f"{f.gate}, {f.length} tokens: {failure}" for f in findings for failure in f.failures]
    verdict = Verdict(not failures, failures[0] if failures else "agrees with the recurrence in float64")
    write_verdict(key, verdict)
    return verdict


def reset_choices() -> None:
    """Forget which kernels raised and which lines were logged in this process."""
    _said.clear()
    _raised.clear()


def _distrust(q: Tensor, dtype: torch.dtype) -> str | None:
    """Why "auto" does not take kernels that could serve the call; None if it does."""
    if dtype != torch.bfloat16:
        return f"for {dtype} only torch keeps full precision"
    verdict = probe_fla(q.device, dtype)
    return None if verdict.passed else f"fla's kernels failed the probe ({verdict.reason})"


def _say_once(message: str, *, warn: bool = False) -> None:
    if message not in _said:
        _said.add(message)
        (logger.warning if warn else logger.info)(message)
