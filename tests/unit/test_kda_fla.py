"""fla behind the contract: fake modules of several versions, kernels that raise or are wrong, layouts and choices.

The real kernels run in `tests/integration/test_fla_interpreter.py`.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import logging

from modeling_k3 import kda_fla, kda_paths, kda_verdicts
from modeling_k3.kda_ops import chunk_kda, recurrent_kda
from tests.models import max_diff
from tests.tolerances import bound
from tests.unit.helpers import kda_inputs

Calls = list[dict[str, Any]]
BF16 = torch.bfloat16


class FakeFla:
    """Stands in for fla: installs modules whose kernels compute in torch and note how they were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.monkeypatch, self.calls = monkeypatch, Calls()
        self.spoil: Callable[[Tensor], Tensor] | None = None
        self.versions = {"fla-core": "0.6.0", "triton": "3.7.1"}
        installed = importlib.metadata.version

        def version(name: str) -> str:
            if name not in self.versions and name in ("fla-core", "flash-linear-attention", "triton"):
                raise importlib.metadata.PackageNotFoundError(name)
            return self.versions.get(name) or installed(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(kda_fla, "SUPPORTED_DEVICES", ["cuda", "cpu"])
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(kda_verdicts, "_seen", {})

    def install(self, chunk: Callable[..., Any] | None = None, recurrent: Callable[..., Any] | None = None) -> None:
        for name in ("fla", "fla.ops", "fla.ops.kda"):
            self.monkeypatch.setitem(sys.modules, name, ModuleType(name))
        kda = sys.modules["fla.ops.kda"]
        kda.chunk_kda = chunk or self.chunk_kda
        kda.fused_recurrent_kda = recurrent or self.fused_recurrent_kda
        kda_fla.find_kernels.cache_clear()

    def _compute(self, name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kw: Any) -> Any:
        self.calls.append({"name": name, "dtypes": [x.dtype for x in (q, k, v, g, beta)], **kw})
        assert kw["scale"] == q.shape[-1] ** -0.5 and kw["output_final_state"] is True
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        o, state = chunk_kda(q, k, v, g, beta, kw["initial_state"], cu_seqlens=kw["cu_seqlens"])
        if kw["initial_state"] is not None and name == "recurrent":
            kw["initial_state"].fill_(float("nan"))
        return (o if self.spoil is None else self.spoil(o)).to(v.dtype), state

    def chunk_kda(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any = None, initial_state: Any = None,
        output_final_state: bool = False, safe_gate: bool = False, cu_seqlens: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        options = {"scale": scale, "initial_state": initial_state, "output_final_state": output_final_state}
        return self._compute("chunk", q, k, v, g, beta, **options, safe_gate=safe_gate, cu_seqlens=cu_seqlens)

    def fused_recurrent_kda(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any = None, initial_state: Any = None,
        output_final_state: bool = False, cu_seqlens: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        options = {"scale": scale, "initial_state": initial_state, "output_final_state": output_final_state}
        return self._compute("recurrent", q, k, v, g, beta, **options, cu_seqlens=cu_seqlens)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeFla]:
    fake = FakeFla(monkeypatch, tmp_path)
    fake.install()
    kda_paths.reset_choices()
    yield fake
    kda_fla.find_kernels.cache_clear()
    kda_paths.reset_choices()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(kda_paths.logger, "warning", lambda line: lines.append(f"warning: {line}"))
    monkeypatch.setattr(kda_paths.logger, "info", lambda line: lines.append(f"info: {line}"))
    return lines


def inputs_of(length: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    """As `K3DeltaAttention` calls: q and k in float32, v in the dtype of the activations."""
    inputs = kda_inputs(1, length, 2, 16, 12, dtype=torch.float32)
    inputs[2] = inputs[2].to(dtype)
    return inputs


def test_a_call_keeps_layout_state_and_bounds(fla: FakeFla) -> None:
    inputs = inputs_of(40)
    kept = inputs[5].clone()
    o, state = kda_fla.fla_kda(*inputs, lower_bound=-5.0)
    expected_o, expected = chunk_kda(*(x.to(BF16) for x in inputs[:3]), *inputs[3:])
    call = fla.calls[-1]
    assert call["name"] == "chunk" and call["safe_gate"] is True
    assert call["dtypes"] == [BF16, BF16, BF16, torch.float32, torch.float32]
    assert call["initial_state"].dtype == o.dtype == state.dtype == torch.float32
    assert torch.equal(o, expected_o.to(BF16).float()) and torch.equal(state, expected)
    kda_fla.fla_kda(*inputs)
    assert fla.calls[-1]["safe_gate"] is False
    kda_fla.fla_kda(*(x[:, :1] for x in inputs[:5]), inputs[5])
    assert fla.calls[-1]["name"] == "recurrent" and torch.equal(inputs[5], kept)


def test_a_short_call_that_needs_a_backward_takes_the_chunk_kernel(fla: FakeFla) -> None:
    inputs = [x.requires_grad_() for x in inputs_of(4, torch.float32)]
    kda_fla.fla_kda(*inputs)
    assert fla.calls[-1]["name"] == "chunk"


def test_packed_rows_pass_their_borders(fla: FakeFla) -> None:
    inputs, borders = inputs_of(40, torch.float32)[:5], torch.tensor([0, 7, 40], dtype=torch.int32)
    o, state = kda_paths.run_kda("fla", *inputs, None, cu_seqlens=borders)
    expected_o, expected = recurrent_kda(*inputs, cu_seqlens=borders)
    assert fla.calls[-1]["cu_seqlens"].dtype == torch.int64
    assert max_diff(o, expected_o) < bound("unit_kda_fp32_max_abs") and max_diff(state, expected) < 1e-5


def test_auto_takes_a_kernel_that_passes_the_probe_and_says_so_once(fla: FakeFla, log: list[str]) -> None:
    for _ in range(2):
        kda_paths.run_kda("auto", *inputs_of(40), lower_bound=-5.0)
    assert fla.calls[-1]["name"] == "chunk"
    assert (
        [line for line in log if "fla" in line] == log and len(log) == 1 and log[0].startswith("info: KDA runs on fla")
    )
    calls = len(fla.calls)
    kda_verdicts.forget_verdicts()
    kda_paths.run_kda("auto", *inputs_of(40), lower_bound=-5.0)
    assert len(fla.calls) == calls + 1, "the stored verdict saves the probe"


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=BF16)],
    ids=["no_grad", "inference", "autocast"],
)
def test_the_probe_works_wherever_the_first_call_stands(fla: FakeFla, context: Callable[[], Any]) -> None:
    with context():
        kda_paths.run_kda("auto", *inputs_of(40), lower_bound=-5.0)
    verdict = kda_paths.probe_fla(torch.device("cpu"), BF16)
    assert verdict.passed, verdict


def test_auto_leaves_float32_to_torch(fla: FakeFla, log: list[str]) -> None:
    kda_paths.run_kda("auto", *inputs_of(40, torch.float32), lower_bound=-5.0)
    assert not fla.calls and "only torch keeps full precision" in log[0]


def test_auto_never_takes_a_kernel_with_a_wrong_gradient(fla: FakeFla, log: list[str]) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * 1.1

    fla.spoil = Wrong.apply
    inputs = inputs_of(40)
    o, state = kda_paths.run_kda("auto", *inputs, lower_bound=-5.0)
    expected_o, expected = chunk_kda(*inputs, lower_bound=-5.0)
    assert torch.equal(o, expected_o) and torch.equal(state, expected)
    assert "failed the probe" in log[-1] and "is off by" in log[-1]
    assert not kda_paths.probe_fla(torch.device("cpu"), BF16).passed


def test_a_kernel_that_raises_is_left_for_good_with_one_warning(fla: FakeFla, log: list[str]) -> None:
    def raising(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any = None, initial_state: Any = None,
                output_final_state: bool = False, safe_gate: bool = False, cu_seqlens: Any = None) -> Any:  # fmt: skip
        fla.calls.append({})
        raise RuntimeError("0 active drivers")

    fla.install(chunk=raising)
    inputs = inputs_of(40)
    expected = chunk_kda(*inputs, lower_bound=-5.0)
    for _ in range(3):
        found = kda_paths.run_kda("fla", *inputs, lower_bound=-5.0)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert len(fla.calls) == 1
    assert len([line for line in log if "0 active drivers" in line and "failed" in line]) == 1


def test_running_out_of_memory_is_not_a_fault_of_the_kernel(fla: FakeFla) -> None:
    def full(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any = None, initial_state: Any = None,
             output_final_state: bool = False, safe_gate: bool = False, cu_seqlens: Any = None) -> Any:  # fmt: skip
        raise torch.OutOfMemoryError("full")

    fla.install(chunk=full)
    with pytest.raises(torch.OutOfMemoryError):
        kda_paths.run_kda("fla", *inputs_of(40))


def test_an_old_signature_is_refused(fla: FakeFla) -> None:
    def old(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any = None, initial_state: Any = None,
            output_final_state: bool = False, cu_seqlens: Any = None, **kwargs: Any) -> Any:  # fmt: skip
        raise AssertionError("must not be called")

    fla.install(chunk=old)
    assert "does not know ['safe_gate']" in str(kda_fla.find_kernels())
    found = kda_paths.run_kda("auto", *inputs_of(40))
    assert torch.equal(found[0], chunk_kda(*inputs_of(40))[0])


@pytest.mark.parametrize("version", ["0.5.0", "0.4.2", ""])
def test_an_old_version_is_refused(fla: FakeFla, version: str) -> None:
    fla.versions = {"triton": "3.7.1", **({"fla-core": version} if version else {})}
    fla.install()
    assert "older than 0.5.1" in str(kda_fla.find_kernels())


def test_what_the_kernels_cannot_do_is_refused(fla: FakeFla) -> None:
    q = torch.zeros(1, 20, 1, 64)
    assert kda_fla.refusal(q, -5.0, True, BF16) is None
    assert "float16" in kda_fla.refusal(q, -5.0, True, torch.float16)
    assert "key dim 300" in kda_fla.refusal(torch.zeros(1, 2, 1, 300), -5.0, True, BF16)
    assert "lower bound -6" in kda_fla.refusal(q, -6.0, True, BF16)
    assert "meta" in kda_fla.refusal(q.to("meta"), -5.0, True, BF16)


@pytest.mark.parametrize(
    ("triton", "bad"), [("3.3.1", False), ("3.4.0", True), ("3.7.0", True), ("3.7.1", False), ("3.9.0", False)]
)
def test_the_hopper_window_concerns_the_backward_only(
    fla: FakeFla, monkeypatch: pytest.MonkeyPatch, triton: str, bad: bool
) -> None:
    fla.versions["triton"] = triton
    fla.install()
    monkeypatch.setattr(kda_fla, "is_hopper", lambda device: True)
    q = torch.zeros(1, 20, 1, 64)
    assert (kda_fla.refusal(q, -5.0, True, BF16) is not None) == bad
    assert kda_fla.refusal(q, -5.0, False, BF16) is None
    monkeypatch.setattr(kda_fla, "is_hopper", lambda device: False)
    assert kda_fla.refusal(q, -5.0, True, BF16) is None


def test_without_fla_the_wish_for_it_is_one_warning(
    fla: FakeFla, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    kda_fla.find_kernels.cache_clear()
    for _ in range(2):
        found = kda_paths.run_kda("fla", *inputs_of(40), lower_bound=-5.0)
    assert torch.equal(found[0], chunk_kda(*inputs_of(40), lower_bound=-5.0)[0])
    assert len(log) == 1 and log[0].startswith(
        "warning: kda_implementation='fla' is not possible: fla's kernels cannot"
    )


def test_on_a_cpu_fla_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton is importable on many machines without a GPU, where its kernels crash."""

    def fail() -> None:
        raise AssertionError("looked for fla")

    monkeypatch.setattr(kda_fla, "find_kernels", fail)
    kda_paths.run_kda("auto", *inputs_of(40), lower_bound=-5.0)
    kda_paths.run_kda("fla", *inputs_of(40), lower_bound=-5.0)


def test_versions_are_read_as_numbers() -> None:
    assert (
        kda_fla.numbers("3.7.1+git1") == (3, 7, 1)
        and kda_fla.numbers("0.10.0rc1") == (0, 10)
        and not kda_fla.numbers("")
    )


def test_names_of_implementations() -> None:
    assert kda_paths.check_kda_implementation("fla") == "fla"
    with pytest.raises(ValueError, match=r"kda_implementation='fast' is unknown; allowed are \['auto', 'chunk'"):
        kda_paths.check_kda_implementation("fast")
    assert logging.get_logger("modeling_k3.kda_paths") is kda_paths.logger
