"""The wheel holds what the tree holds: every module, preset and notice, and the `k3` command."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

from tests.layout_source import ROOT, tracked_files

pytestmark = pytest.mark.slow

# Folders at the top of the tree that setup.cfg maps into the package.
_MAPPED = ("configuration/", "conversion/")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZipFile]:
    """Build from a copy: a build writes into its tree, and leftovers of an older build there would be packed too."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in tracked_files():
        if not name.startswith("tests/"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), "."]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    with ZipFile(path) as opened:
        yield opened


def _installed_name(name: str) -> str:
    return f"modeling_k3/{name}" if name.startswith(_MAPPED) else name


def _read_metadata(wheel: ZipFile, name: str) -> str:
    (path,) = (entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_every_module_is_in_the_wheel(wheel: ZipFile) -> None:
    sources = {name for name in tracked_files() if name.endswith(".py") and name.startswith(("modeling_k3/", *_MAPPED))}
    missing = {_installed_name(name) for name in sources} - set(wheel.namelist())
    assert not missing


def test_every_preset_is_in_the_wheel(wheel: ZipFile) -> None:
    wanted = {"config.json", "generation_config.json"}
    presets = {
        name
        for name in tracked_files()
        if name.startswith("configuration/")
        and name.count("/") == 2
        and (PurePosixPath(name).name in wanted or PurePosixPath(name).name.startswith("NOTICE"))
    }
    missing = {_installed_name(name) for name in presets} - set(wheel.namelist())
    assert not missing


def test_nothing_else_lands_beside_the_package(wheel: ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"modeling_k3"}


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE"])
def test_licence_and_notice_go_along(wheel: ZipFile, name: str) -> None:
    assert _read_metadata(wheel, f"licenses/{name}") == (ROOT / name).read_text(encoding="utf-8")
    assert f"License-File: {name}" in _read_metadata(wheel, "METADATA").splitlines()


def test_metadata_states_licence_and_python(wheel: ZipFile) -> None:
    lines = _read_metadata(wheel, "METADATA").splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.11" in lines


def test_the_command_is_declared(wheel: ZipFile) -> None:
    assert "k3 = modeling_k3.cli:main" in _read_metadata(wheel, "entry_points.txt").splitlines()


def test_installed_package_finds_its_presets(wheel: ZipFile, tmp_path: Path) -> None:
    """Read the presets from the unpacked wheel, away from this tree, without importing the model."""
    wheel.extractall(tmp_path)
    listing = {path.parent.name for path in tmp_path.glob("modeling_k3/configuration/*/config.json")}
    code = "import runpy; print(*runpy.run_path('modeling_k3/configuration/__init__.py')['preset_names']())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == listing
