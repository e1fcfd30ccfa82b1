"""`k3 demo` as a command: interrupted and resumed, quick to help, readable when it refuses."""

import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modeling_k3.cli import app
from modeling_k3.demo.state import read_progress
from tests.integration.test_demo import HELD_OUT


def k3(*words: str) -> list[str]:
    """The command as the installed script would be called: named k3. Less text is held out, to save time."""
    code = (
        "import sys; sys.argv[0] = 'k3'; import modeling_k3.demo.corpus as corpus\n"
        f"corpus.HELD_OUT_BYTES = {HELD_OUT}\n"
        "from modeling_k3.cli import main; main()"
    )
    return [sys.executable, "-c", code, *words]


def test_help_does_not_wait_for_torch() -> None:
    script = Path(sysconfig.get_path("scripts")) / "k3"
    command = [sys.executable, "-X", "importtime", str(script), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "demo" in result.stdout and "generate" in result.stdout
    assert re.search(r"\| +typer$", result.stderr, re.MULTILINE)
    assert not re.search(r"\| +(torch|transformers|matplotlib)$", result.stderr, re.MULTILINE)


def test_a_script_that_happens_to_be_called_k3_registers(tmp_path: Path) -> None:
    (tmp_path / "k3").write_text(
        "import modeling_k3\nfrom transformers import AutoConfig\nprint(AutoConfig.for_model('k3').model_type)\n"
    )
    command = [sys.executable, str(tmp_path / "k3")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "k3\n"


def test_ctrl_c_in_the_command_says_how_to_go_on_and_it_does(texts: Path, preset: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--train", "--out", str(out), "--preset", preset, "--data", str(texts), "--seconds", "3", "--threads", "1"]
    command = k3("demo", *words)
    with subprocess.Popen([*command, "--fresh"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "step" in line:
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "everything is saved" in output and f"k3 demo --train --out {out}" in output and "--fresh" not in output
    assert "Traceback" not in errors
    step = read_progress(out / "checkpoints")["step"]

    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert f"resuming after step {step}" in result.stdout
    assert "held-out bits per byte" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "gigantic"], "Allowed are"),
        (["--preset", "kimi-k3"], "the demo trains models of up to"),
        (["--data", "no/such/place"], "no such file or directory: no/such/place"),
        (["--data", __file__], "too little text"),
        (["--seconds", "-3"], "--seconds"),
        (["--colour"], "--colour"),
        (["--model", "examples/pico"], "leave out --train"),
        (["--save", str(Path(__file__).parent)], "exists already"),
    ],
)
def test_what_cannot_work_is_refused_readably(words: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--train", "--out", str(tmp_path / "run"), *words])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()
