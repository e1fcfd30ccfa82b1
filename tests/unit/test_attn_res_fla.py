"""The fused mixture: when it is called, that it must be right first, and what happens when it fails."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import attn_res_fla, kda_fla, kda_verdicts
from modeling_k3.attn_res import mix_residuals
from tests.models import max_diff
from tests.tolerances import bound
from tests.unit.helpers import tensor

Install = Callable[..., list[int]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Put a fake fla in place whose kernel computes in torch, spoiled by `spoil`; returns the list of its calls."""
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.6.0" if n == "fla-core" else installed(n))
    monkeypatch.setattr(kda_fla, "SUPPORTED_DEVICES", kda_fla.SUPPORTED_DEVICES)
    kda_fla.SUPPORTED_DEVICES.append("cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kda_verdicts, "_seen", {})

    def put(spoil: Callable[[Tensor], Tensor] = lambda h: h) -> list[int]:
        calls: list[int] = []

        def fused_attnres(
            query: Tensor, residuals: Sequence[Tensor], rms_weight: Tensor, rms_eps: float = 1e-6,
            return_weights: bool = False,
        ) -> Any:  # fmt: skip
            calls.append(len(residuals))
            values = torch.stack([x.double() for x in residuals])
            keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + rms_eps) * rms_weight.double()
            p = (keys @ query.double()).softmax(0)
            return spoil((p.unsqueeze(-1) * values).sum(0)).to(residuals[0].dtype), p.float()

        for name in ("fla", "fla.ops", "fla.ops.attnres"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["fla.ops.attnres"].fused_attnres = fused_attnres
        attn_res_fla.find_fused_mix.cache_clear()
        attn_res_fla.reset_fused_mix()
        return calls

    yield put
    kda_fla.SUPPORTED_DEVICES.remove("cpu")
    attn_res_fla.find_fused_mix.cache_clear()
    attn_res_fla.reset_fused_mix()


def mix(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    sources = [tensor(2, 5, 32, seed=i, dtype=torch.float32).requires_grad_(requires_grad) for i in range(4)]
    return mix_residuals(sources, tensor(32, dtype=torch.float32), tensor(32, seed=9, dtype=torch.float32), eps=1e-5)


def test_the_fused_kernel_gives_what_torch_gives(install: Install) -> None:
    expected_h, expected_p = mix()
    calls = install()
    h, p = mix()
    assert calls == [5, 4], "the trial, then the call"
    assert max_diff(h, expected_h) < bound("unit_fp32_max_abs") and max_diff(p, expected_p) < bound("unit_fp32_max_abs")
    mix()
    assert calls == [5, 4, 4]


def test_gradients_are_left_to_torch(install: Install) -> None:
    calls = install()
    h, p = mix(requires_grad=True)
    assert not calls and h.requires_grad and p.requires_grad


def test_a_wrong_kernel_is_never_used(install: Install) -> None:
    expected = mix()
    calls = install(spoil=lambda h: h * 1.01)
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(mix(), expected, strict=True))
    assert calls == [5]


def test_a_kernel_that_raises_is_left_with_one_warning(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(h: Tensor) -> Tensor:
        raise RuntimeError("0 active drivers")

    expected, calls, lines = mix(), install(spoil=fail), []
    monkeypatch.setattr(attn_res_fla.logger, "warning", lines.append)
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(mix(), expected, strict=True))
    assert len(calls) == 1 and len(lines) == 1 and "0 active drivers" in lines[0]


def test_an_old_signature_is_refused(install: Install) -> None:
    install()
    sys.modules["fla.ops.attnres"].fused_attnres = lambda query, residuals: None
    attn_res_fla.find_fused_mix.cache_clear()
    assert "does not know ['return_weights', 'rms_eps', 'rms_weight']" in str(attn_res_fla.find_fused_mix())
    mix()


def test_without_fla_torch_mixes(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setitem(sys.modules, "fla.ops.attnres", None)
    attn_res_fla.find_fused_mix.cache_clear()
    assert "cannot be imported" in str(attn_res_fla.find_fused_mix())
    mix()
