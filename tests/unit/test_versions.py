"""The supported versions: one table, the same everywhere it is stated, and a plain error."""

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_k3 import versions
from modeling_k3.versions import PYTHON, SUPPORTED, check_versions, release
from tests.layout_source import ROOT


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.24.0", (5, 24, 0)), ("5.25.0.dev0", (5, 25, 0)), ("5.24rc1", (5, 24)), ("x", ())],
)
def test_release(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


def test_what_is_installed_here_is_supported() -> None:
    check_versions()


@pytest.mark.parametrize(
    ("name", "found", "says"),
    [
        ("transformers", "5.23.9", "transformers>=5.24,<5.25 and found transformers 5.23.9"),
        ("transformers", "4.57.1", "pip install 'transformers>=5.24,<5.25'"),
        ("transformers", "5.25.0", "found transformers 5.25.0"),
        ("torch", "2.9.1+cu128", r"torch>=2.13 and found torch 2.9.1\+cu128"),
        ("torch", None, "torch>=2.13, which is not installed"),
    ],
)
def test_other_versions_are_refused(name: str, found: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(asked: str) -> str:
        if asked != name:
            return {"torch": "2.14.0", "transformers": "5.24.3"}[asked]
        if found is None:
            raise versions.PackageNotFoundError(asked)
        return found

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(ImportError, match=says):
        check_versions()


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.sys, "version_info", (3, 10, 14))
    with pytest.raises(ImportError, match=r"Python 3\.11 or newer and runs in 3\.10\.14; .*: python3\.11 -m venv"):
        check_versions()


def test_the_package_says_the_same() -> None:
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    assert options["options"]["python_requires"] == f">={'.'.join(map(str, PYTHON))}"
    required = options["options"]["install_requires"].split()
    for name, (low, high) in SUPPORTED.items():
        assert f"{name}>={low}" + (f",<{high}" if high else "") in required


def test_the_readme_says_the_same() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| supported |")]
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == ["3.11 and newer", "2.13 and newer", "5.24"]


@pytest.mark.parametrize(("name", "found"), [("transformers", "4.57.1"), ("torch", "2.9.0")])
def test_the_command_says_it_in_one_line(name: str, found: str, tmp_path: Path) -> None:
    """Started as pip installs it, where another version stands first on the path."""
    script = tmp_path / "k3"
    script.write_text("import sys\nfrom modeling_k3.cli import main\nsys.exit(main())\n")
    metadata = tmp_path / "packages" / f"{name}-{found}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {found}\n")
    path = os.pathsep.join([str(tmp_path / "packages"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(script), "--help"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: modeling_k3 needs {name}>=") and f"found {name} {found}: pip install '" in line


def test_the_check_comes_first_and_costs_nothing() -> None:
    """An import with a wrong version ends there, with no import of torch on the way."""
    code = """
        import importlib.metadata, sys
        own = importlib.metadata.version
        importlib.metadata.version = lambda name: "4.57.1" if name == "transformers" else own(name)
        try:
            import modeling_k3
        except ImportError as error:
            print("torch" in sys.modules, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.startswith("False modeling_k3 needs transformers>=5.24,<5.25 and found transformers 4.57.1")
