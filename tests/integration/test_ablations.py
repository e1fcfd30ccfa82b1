"""The ablation benchmark as a command: it trains what is missing, and only that."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ablations.py"


def ablate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    size = ["--preset", "tiny", "--rows", "1", "--length", "64", "--windows", "2"]
    where = ["--out", str(folder / "results"), "--state", str(folder / "state")]
    command = [sys.executable, str(SCRIPT), *words, *size, *where]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_runs_are_kept_and_never_mixed(tmp_path: Path) -> None:
    first = ablate(tmp_path, "gate", "--steps", "2")
    assert first.returncode == 0, first.stderr
    assert [line for line in first.stdout.splitlines() if line.startswith("training")] == [
        "training: baseline", "training: softplus gate",
    ]  # fmt: skip
    results = tmp_path / "results"
    report = json.loads((results / "ablations.json").read_text())
    assert list(report["runs"]) == ["baseline", "softplus gate"] and "single observations" in report["note"]
    assert all(len(run["loads"]) == len(run["train_bits"]) == 2 for run in report["runs"].values())
    assert all(0 < run["held_out_bits_per_byte"] < 10 for run in report["runs"].values())
    with Image.open(results / "ablations.png") as image:
        assert image.format == "PNG"
    again = ablate(tmp_path, "gate", "--steps", "2")
    assert again.returncode == 0 and "training" not in again.stdout and "softplus gate" in again.stdout
    other = ablate(tmp_path, "gate", "--steps", "3")
    assert other.returncode == 1 and "another setting" in other.stderr
    assert json.loads((results / "ablations.json").read_text()) == report
