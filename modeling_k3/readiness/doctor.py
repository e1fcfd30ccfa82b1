"""`k3 doctor`: which operators this machine has, by which implementation and version, verified or refused and why."""

import json
import os
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from modeling_k3.kda_verdicts import verdict_file
from modeling_k3.readiness.operators import MISSING, REFUSED, VERIFIED, OperatorReport, inspect_operators

_COLOURS = {VERIFIED: "green", REFUSED: "red", MISSING: "dim"}


def examine(
    device: str | None = None, *, thorough: bool = False, again: bool = False, console: Console | None = None
) -> list[OperatorReport]:
    """Check every operator and print a table.

    Args:
        device: where to run; None for the GPU if there is one, else the CPU.
        thorough: longer sequences too.
        again: forget stored verdicts of GPU kernels.
        console: where to print; None for nowhere.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    reports = list(inspect_operators(device, thorough=thorough, again=again))
    if console is not None:
        console.print(f"{describe_machine(device)}\n")
        console.print(as_table(reports))
        console.print(f"Verdicts about GPU kernels are kept in {verdict_file()}", style="dim", soft_wrap=True)
    return reports


def describe_machine(device: str) -> str:
    """One line: device, cores, torch, system."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {os.cpu_count()} cores"
    return f"{name}; torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"


def as_table(reports: list[OperatorReport]) -> Table:
    """The reports as a table for a terminal."""
    table = Table("operator", "by", "status", "error", "why")
    for report in reports:
        error = "" if report.error is None else f"{report.error:.0e}"
        colour = _COLOURS[report.status]
        # torch's own version stands above the table.
        is_named = report.version == "-" or report.version.startswith("torch")
        table.add_row(
            report.operator,
            report.implementation if is_named else report.version,
            f"[{colour}]{report.status}[/{colour}]",
            error,
            report.reason,
        )
    return table


def is_ready(reports: list[OperatorReport]) -> bool:
    """Whether every operator has an implementation that was verified; a refused one is not chosen."""
    families = {"KDA chunk and recurrent": "KDA chunk"}
    verified = {families.get(r.operator, r.operator) for r in reports if r.status == VERIFIED}
    return all(families.get(r.operator, r.operator) in verified for r in reports)


def write_json(reports: list[OperatorReport], path: Path, device: str) -> None:
    """Write the reports for a machine to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [vars(report) for report in reports]
    content = {"machine": describe_machine(device), "ready": is_ready(reports), "operators": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
