"""What is written beside a figure."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.measure import machine


def test_a_figure_has_its_command_and_date_and_no_folder_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path.parent / "x"
    words = [tmp_path / "benchmarks" / "a.py", "--dir", elsewhere, f"--to={elsewhere}", "--note", "two words", "-n", 3]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    found = machine()
    assert found["command"] == "python benchmarks/a.py --dir ... --to=... --note 'two words' -n 3"
    assert found["date"] == time.strftime("%Y-%m-%d") and found["cores"] > 0
