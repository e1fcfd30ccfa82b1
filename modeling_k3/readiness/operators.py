"""Every operator of the model, by every implementation this machine has, against plain arithmetic in float64."""

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling_k3.attn_res import mix_residuals
from modeling_k3.attn_res_fla import probe_fused_mix
from modeling_k3.configuration_k3 import K3Config
from modeling_k3.experts import K3Experts
from modeling_k3.kda_check import Finding, check_path
from modeling_k3.kda_fla import SUPPORTED_DEVICES, find_kernels, refusal
from modeling_k3.kda_ops import chunk_kda, decay_gate, exact_kda, recurrent_kda
from modeling_k3.kda_paths import probe_fla
from modeling_k3.kda_verdicts import Verdict
from modeling_k3.latent_moe import K3Router
from modeling_k3.norms import FUSED_GATED_NORM, K3RMSNormGated
from modeling_k3.short_conv import FUSED_FILTER, K3ShortConvolution

#: Relative error allowed to an operator in float32 against float64: some dozen roundings of 6e-8.
_FP32_LIMIT = 2e-6
_LENGTHS, _MORE_LENGTHS = (1, 65, 200), (1, 15, 65, 300, 1024)

VERIFIED, REFUSED, MISSING = "verified", "refused", "not available"


@dataclass(frozen=True)
class OperatorReport:
    """One operator by one implementation.

    Args:
        status: `VERIFIED`, `REFUSED` (there, but wrong or not allowed) or `MISSING`.
        error: largest relative error found, None where nothing ran.
    """

    operator: str
    implementation: str
    version: str
    status: str
    reason: str
    error: float | None = None


def inspect_operators(device: str = "cpu", *, thorough: bool = False, again: bool = False) -> Iterator[OperatorReport]:
    """Yield a report for each operator and implementation.

    Args:
        device: where to run, as torch names it.
        thorough: longer sequences too.
        again: try fla's kernels even if a verdict is stored.
    """
    lengths = _MORE_LENGTHS if thorough else _LENGTHS
    yield _kda("KDA chunk", chunk_kda, device, lengths)
    yield _fla("KDA chunk and recurrent", device, again)
    yield _kda("KDA recurrent", _plain(recurrent_kda), device, [n for n in lengths if n <= 300])
    yield _kda("KDA exact", _plain(exact_kda), device, [n for n in lengths if n <= 300])
    yield from _simple_operators(device)
    yield _fused("AttnRes mixing", device, lambda *x: probe_fused_mix(*x, again=again))
    for kernel in (FUSED_GATED_NORM, FUSED_FILTER):
        yield _fused(kernel.name, device, functools.partial(kernel.probe, again=again))
    yield from _experts(device)


def _plain(path: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Drop the promise about decays for a path that has no use for it."""
    return lambda *inputs, lower_bound=None: path(*inputs)


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def _kda(
    name: str, path: Callable[..., tuple[Tensor, Tensor]], device: str, lengths: tuple[int, ...] | list[int]
) -> OperatorReport:
    try:
        findings = list(check_path(path, [torch.float32], lengths, device))
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:160]}"
        return OperatorReport(name, "torch", _torch_version(), REFUSED, reason)
    return summarize(name, "torch", _torch_version(), findings)


def summarize(operator: str, implementation: str, version: str, findings: list[Finding]) -> OperatorReport:
    """One report from the findings over all cases: refused as soon as one of them fails."""
    errors = [error for finding in findings for error in finding.errors.values()]
    failures = [f"{f.gate}, {f.length} tokens, {f.dtype}: {failure}" for f in findings for failure in f.failures]
    status = REFUSED if failures else VERIFIED
    reason = failures[0] if failures else f"{len(findings)} cases: values, state, gradients, causality"
    return OperatorReport(operator, implementation, version, status, reason, max(errors) if errors else None)


def _fla(name: str, device: str, again: bool) -> OperatorReport:
    """fla's kernels, in the dtype in which "auto" would choose them."""
    q = torch.empty(1, 64, 1, 64, device=device)
    why_not = refusal(q, -5.0, needs_grad=True, dtype=torch.bfloat16)
    if why_not is not None:
        absent = device.startswith("cpu") or _fla_version() == "-"
        return OperatorReport(name, "fla", _fla_version(), MISSING if absent else REFUSED, why_not)
    kernels = find_kernels()
    verdict = probe_fla(q.device, torch.bfloat16, again=again)
    status = VERIFIED if verdict.passed else REFUSED
    return OperatorReport(name, "fla", f"fla-core {kernels.version}", status, verdict.reason)


def _fused(name: str, device: str, probe: Callable[[torch.device, torch.dtype], Verdict]) -> OperatorReport:
    """One of fla's kernels around the recurrence, in bfloat16; a trial that raises is a refusal."""
    version = _fla_version()
    if torch.device(device).type not in SUPPORTED_DEVICES:
        return OperatorReport(name, "fla", version, MISSING, f"tensors are on {device}")
    try:
        verdict = probe(torch.device(device), torch.bfloat16)
    except Exception as error:
        verdict = Verdict(False, f"{type(error).__name__}: {str(error)[:160]}")
    if verdict.passed:
        return OperatorReport(name, "fla", version, VERIFIED, verdict.reason)
    return OperatorReport(name, "fla", version, MISSING if version == "-" else REFUSED, verdict.reason)


def _fla_version() -> str:
    try:
        return f"fla-core {importlib.metadata.version('fla-core')}"
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _simple_operators(device: str) -> Iterator[OperatorReport]:
    """Operators whose truth is a line or two."""
    checks: dict[str, Callable[[Callable[..., Tensor]], tuple[Tensor, Tensor]]] = {
        "short convolution": _convolution,
        "decay gate, bounded": functools.partial(_gate, lower_bound=-5.0),
        "decay gate, softplus": functools.partial(_gate, lower_bound=None),
        "gated norm": _gated_norm,
        "AttnRes mixing": _mixing,
        "router": _router,
    }
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    for name, check in checks.items():
        yield judge(name, "torch", functools.partial(check, normal))


def judge(operator: str, implementation: str, check: Callable[[], tuple[Tensor, Tensor]]) -> OperatorReport:
    """Run a check that returns (found, true); an exception is a refusal with its message."""
    try:
        with torch.no_grad():
            found, true = check()
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:160]}"
        return OperatorReport(operator, implementation, _torch_version(), REFUSED, reason)
    error = ((found.double() - true).norm() / true.norm()).item() if found.isfinite().all() else float("inf")
    passed = error <= _FP32_LIMIT
    reason = "agrees with float64" if passed else f"is off by {error:.1e} of its size, allowed {_FP32_LIMIT:.0e}"
    return OperatorReport(operator, implementation, _torch_version(), VERIFIED if passed else REFUSED, reason, error)


def _place(module: nn.Module, like: Tensor) -> nn.Module:
    return module.to(like.device)


def _convolution(normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    z, window = normal(2, 40, 24), normal(2, 24, 4)
    convolution = _place(K3ShortConvolution(24, 4), z)
    convolution.weight.copy_(normal(24, 1, 4))
    found, _ = convolution(z, window)
    stream = torch.cat([window[..., 1:], z.mT], dim=-1).double()
    return found, F.silu(F.conv1d(stream, convolution.weight.double(), groups=24)).mT


def _gate(normal: Callable[..., Tensor], *, lower_bound: float | None) -> tuple[Tensor, Tensor]:
    z, a_log, bias = normal(2, 40, 24), normal(3), normal(24)
    r, rate = (z.double() + bias.double()).unflatten(-1, (3, 8)), a_log.double().exp()[:, None]
    true = -rate * torch.log1p(r.exp()) if lower_bound is None else lower_bound / (1 + (-rate * r).exp())
    return decay_gate(z, a_log, bias, lower_bound=lower_bound), true


def _gated_norm(normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    x, gate = normal(2, 40, 3, 16), normal(2, 40, 3, 16)
    norm = _place(K3RMSNormGated(16, eps=1e-5), x)
    wide = x.double()
    true = (
        wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double() / (1 + (-gate.double()).exp())
    )
    return norm(x, gate), true


def _mixing(normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    sources, query, gain = [normal(2, 40, 32) for _ in range(4)], normal(32), normal(32)
    found, _ = mix_residuals(sources, query, gain, eps=1e-5)
    values = torch.stack([x.double() for x in sources])
    keys = values / (values.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
    weights = (keys @ query.double()).softmax(0)
    return found, (weights.unsqueeze(-1) * values).sum(0)


def _router(normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    config = K3Config()
    x = normal(50, config.hidden_size)
    router = _place(K3Router(config), x)
    router.weight.copy_(normal(*router.weight.shape))
    _, weights, chosen = router(x)
    scores = x.double() @ router.weight.double().T
    scores = scores.sigmoid() if config.moe_router_activation_func == "sigmoid" else scores.softmax(-1)
    picked = scores.gather(1, chosen)
    true = picked / picked.sum(-1, keepdim=True) if config.moe_renormalize else picked
    return weights, true * config.routed_scaling_factor


def _experts(device: str) -> Iterator[OperatorReport]:
    """Expert products by every implementation the library offers for dense experts."""
    generator = torch.Generator().manual_seed(1)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        config = K3Config()
        config._experts_implementation = implementation
        experts = K3Experts(config).to(device)
        for parameter in experts.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            parameter.data.copy_(noise)
        z = torch.randn(30, experts.hidden_dim, generator=generator).to(device)
        chosen = torch.stack([torch.randperm(config.num_experts, generator=generator)[:2] for _ in z]).to(device)
        weights = torch.rand(30, 2, generator=generator).to(device)
        yield judge("expert products", implementation, functools.partial(_expert_sum, experts, z, chosen, weights))


def _expert_sum(experts: K3Experts, z: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    found = experts(z, chosen, weights)
    wide = K3Experts(K3Config()).to(z.device).double()
    wide.load_state_dict({name: tensor.double() for name, tensor in experts.state_dict().items()})
    # The definition, expert by expert, in float64.
    wide.config._experts_implementation = "eager"
    return found, wide(z.double(), chosen, weights.double())
