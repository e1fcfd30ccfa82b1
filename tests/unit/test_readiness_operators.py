"""The probe verifies what is right, refuses what is wrong, and says what is missing."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from modeling_k3.kda_check import Finding
from modeling_k3.kda_verdicts import Verdict
from modeling_k3.readiness import operators
from modeling_k3.readiness.doctor import as_table, is_ready, write_json
from modeling_k3.readiness.operators import MISSING, REFUSED, VERIFIED, OperatorReport, judge, summarize


def test_simple_operators_and_experts_are_verified() -> None:
    reports = [*operators._simple_operators("cpu"), *operators._experts("cpu")]
    assert {r.operator for r in reports} >= {"short convolution", "AttnRes mixing", "router", "expert products"}
    assert all(r.status == VERIFIED and r.error is not None for r in reports), reports


def test_fla_is_not_available_on_a_cpu() -> None:
    report = operators._fla("KDA", "cpu", False)
    assert report.status in (MISSING, REFUSED) and "tensors are on cpu" in report.reason


def test_kernels_around_the_recurrence_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Verdict:
        raise RuntimeError("no kernel image")

    passed = Verdict(True, "agrees with float64")
    assert operators._fused("gated norm", "cpu", lambda *x: passed).status == MISSING
    monkeypatch.setattr(operators, "SUPPORTED_DEVICES", ["cpu"])
    monkeypatch.setattr(operators, "_fla_version", lambda: "fla-core 0.6.0")
    assert operators._fused("gated norm", "cpu", lambda *x: passed).status == VERIFIED
    assert operators._fused("gated norm", "cpu", lambda *x: Verdict(False, "off by 1")).status == REFUSED
    report = operators._fused("gated norm", "cpu", fail)
    assert report.status == REFUSED and "no kernel image" in report.reason


def test_one_failing_case_refuses_an_operator() -> None:
    good, bad = Finding("mixed", 9, "float32", {"o": 1e-7}), Finding("mixed", 9, "float32", {"o": 1.0}, ["o is off"])
    assert summarize("KDA", "torch", "1", [good]).status == VERIFIED
    report = summarize("KDA", "torch", "1", [good, bad])
    assert report.status == REFUSED and report.error == 1.0 and "mixed, 9 tokens, float32: o is off" in report.reason


def test_a_check_that_is_off_or_raises_is_refused() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert judge("x", "torch", lambda: (one.float(), one)).status == VERIFIED
    assert "is off by" in judge("x", "torch", lambda: (one.float() * 1.001, one)).reason
    assert judge("x", "torch", lambda: (one * float("nan"), one)).error == float("inf")

    def fail() -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("no kernel")

    report = judge("x", "torch", fail)
    assert report.status == REFUSED and "no kernel" in report.reason


def report(operator: str, status: str) -> OperatorReport:
    return OperatorReport(operator, "torch", "1", status, "why", 1e-7)


def test_ready_means_that_every_operator_has_a_right_implementation(tmp_path: Path) -> None:
    reports = [report("KDA chunk", VERIFIED), report("KDA chunk and recurrent", MISSING), report("router", VERIFIED)]
    assert is_ready(reports)
    assert is_ready([*reports, report("router", REFUSED)])
    assert not is_ready([*reports, report("expert products", REFUSED)])
    write_json(reports, tmp_path / "a" / "b.json", "cpu")
    assert '"ready": true' in (tmp_path / "a" / "b.json").read_text()
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(as_table(reports))
    assert "not available" in console.export_text()


@pytest.mark.slow
def test_every_operator_of_a_cpu_is_verified() -> None:
    reports = list(operators.inspect_operators("cpu", thorough=True))
    assert is_ready(reports), reports
