"""fla's kernels for the gated norm and the short convolution: right first, then used; what happens when they fail."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import fused_kernel, kda_verdicts
from modeling_k3.fused_kernel import FusedKernel
from modeling_k3.norms import FUSED_GATED_NORM, K3RMSNormGated
from modeling_k3.short_conv import FUSED_FILTER, K3ShortConvolution
from tests.models import max_diff
from tests.tolerances import bound
from tests.unit.helpers import tensor

Spoil = Callable[[Tensor], Tensor]
Install = Callable[..., list[str]]


class WrongGradient(torch.autograd.Function):
    """The identity with a gradient that is 2 % too large."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 1.02


def fake_norm(calls: list[str], spoil: Spoil) -> Callable[..., Tensor]:
    def rms_norm_gated(
        x: Tensor, g: Tensor, weight: Tensor, bias: None, activation: str = "swish", eps: float = 1e-6
    ) -> Tensor:
        assert activation == "sigmoid" and bias is None and x.dtype == torch.float32
        calls.append("norm")
        return spoil(x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight * g.float().sigmoid())

    return rms_norm_gated


def fake_convolution(calls: list[str], spoil: Spoil) -> Callable[..., tuple[Tensor, None]]:
    def causal_conv1d(x: Tensor, weight: Tensor, activation: str | None = None, **ignored: Any) -> tuple[Tensor, None]:
        assert activation == "silu" and not ignored and x.is_contiguous() and weight.is_contiguous()
        calls.append("convolution")
        channels, size = weight.shape
        c = torch.nn.functional.conv1d(
            x.float().mT, weight.unsqueeze(1), padding=size - 1, groups=channels
        )[..., : x.shape[1]]  # fmt: skip
        return spoil((c * c.sigmoid()).mT).to(x.dtype), None

    return causal_conv1d


KERNELS = [FUSED_GATED_NORM, FUSED_FILTER]
MAKERS = dict(zip(KERNELS, (fake_norm, fake_convolution), strict=True))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Put a fake fla in place whose kernels compute in torch, spoiled by `spoil`; returns the list of its calls."""
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.6.0" if n == "fla-core" else installed(n))
    monkeypatch.setattr(fused_kernel, "SUPPORTED_DEVICES", ["cpu"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kda_verdicts, "_seen", {})

    def put(spoil: Spoil = lambda y: y) -> list[str]:
        calls: list[str] = []
        for name in ("fla", "fla.modules", "fla.modules.norm"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for kernel, make in MAKERS.items():
            module, _, name = kernel._place.partition(":")
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
            setattr(sys.modules[module], name, make(calls, spoil))
            kernel.reset()
        return calls

    yield put
    for kernel in KERNELS:
        kernel.reset()


def run(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Result and gradients of both modules, with padding in the convolution; weights are seeded."""
    norm, convolution = K3RMSNormGated(8, eps=1e-2), K3ShortConvolution(8, 4)
    norm.weight.data, convolution.weight.data = tensor(8, dtype=torch.float32), tensor(8, 1, 4, dtype=torch.float32)
    x, gate = tensor(2, 5, 8, dtype=torch.float32, scale=0.1).requires_grad_(), tensor(2, 5, 8, seed=1, dtype=dtype)
    z, mask = tensor(2, 5, 8, dtype=dtype).requires_grad_(), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]]).bool()
    y, (c, window) = norm(x, gate), convolution(z, None, mask)
    c = c.masked_fill(~mask.unsqueeze(-1), 0)
    assert y.dtype == c.dtype == dtype
    grads = torch.autograd.grad((y.float() ** 2).sum() + (c.float() ** 2).sum(), [x, z, *norm.parameters()])
    return [y, c, window, *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_give_what_torch_gives(install: Install, dtype: torch.dtype) -> None:
    expected, calls = run(dtype), install()
    for found, true in zip(run(dtype), expected, strict=True):
        limit = bound("unit_fp32_max_abs") if dtype == torch.float32 else 0.02
        assert max_diff(found, true) <= limit
    assert calls == ["norm", "norm", "convolution", "convolution"], "each is tried, then used"
    run(dtype)
    assert calls[4:] == ["norm", "convolution"], "a verdict is kept"


def test_float64_and_other_devices_stay_in_torch(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install()
    run(torch.float64)
    monkeypatch.setattr(fused_kernel, "SUPPORTED_DEVICES", ["cuda"])
    run()
    assert not calls


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda y: y * 1.001, "off by 1.0e-03"),
        (WrongGradient.apply, "gradients off by 2.0e-02"),
        (lambda y: y * float("nan"), "off by inf"),
    ],
    ids=["wrong", "wrong gradient", "nan"],
)
def test_a_wrong_kernel_is_never_used(install: Install, monkeypatch: Any, spoil: Spoil, reason: str) -> None:
    expected, calls, lines = run(), install(spoil), []
    monkeypatch.setattr(fused_kernel.logger, "warning", lines.append)
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True))
    assert calls == ["norm", "convolution"] and len(lines) == 2 and all(reason in line for line in lines)
    for kernel in KERNELS:
        # Known to the next process too.
        kernel.reset()
        assert not kernel.probe(torch.device("cpu"), torch.float32).passed
    assert len(calls) == 2


def test_a_kernel_that_raises_is_left_with_one_warning(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(y: Tensor) -> Tensor:
        raise RuntimeError("0 active drivers")

    expected, calls, lines = run(), install(fail), []
    monkeypatch.setattr(fused_kernel.logger, "warning", lines.append)
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True))
    assert len(calls) == 2 and len(lines) == 2 and all("0 active drivers" in line for line in lines)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_old_or_missing_kernels_are_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch, kernel: FusedKernel
) -> None:
    expected, calls = run(), install()
    module, _, name = kernel._place.partition(":")
    monkeypatch.setattr(sys.modules[module], name, lambda x, weight, **swallowed: x)
    kernel.reset()
    assert "does not know ['activation'" in str(kernel.find())
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.5.0")
    kernel.reset()
    assert "fla 0.5.0 is older than 0.5.1" in str(kernel.find())
    monkeypatch.setitem(sys.modules, module, None)
    kernel.reset()
    assert "cannot be imported" in str(kernel.find())
    assert all(max_diff(x, y) < 1e-5 for x, y in zip(run(), expected, strict=True))
    assert not calls, "0.5.0 is too old for the other one too"


def test_one_line_says_which_path_runs(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    install()
    monkeypatch.setattr(fused_kernel.logger, "info", lines.append)
    run()
    run()
    assert lines == [f"{kernel.name} runs on fla's kernel (cpu, torch.float32)" for kernel in KERNELS]
