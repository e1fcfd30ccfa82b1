"""The wheel holds what the tree holds, and works: in an environment of its own, from another directory.

The environment holds what pip would bring along with the wheel and nothing else, as links to what is installed here (no
network): the packages that it requires, theirs, and so on.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import modeling_k3
from tests.layout_source import ROOT, tracked_files

pytestmark = pytest.mark.slow

# Folders at the top of the tree that setup.cfg maps into the package.
_MAPPED = ("configuration/", "conversion/")
_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: a build writes into its tree, and leftovers of an older build there would be packed too."""
    folder = tmp_path_factory.mktemp("tree")
    for name in tracked_files():
        if not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def build_wheel(source: Path, out: Path) -> Path:
    """The wheel that pip makes of a tree or of a source distribution."""
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", str(out)]
    run([sys.executable, "-m", "pip", "wheel", *options, str(source)], out)
    (path,) = out.glob("*.whl")
    return path


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder, without what this process adds to the path of modules; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings = {**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel_path(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_path: Path) -> Iterator[ZipFile]:
    with ZipFile(wheel_path) as opened:
        yield opened


def link_required(requirements: list[str], extra: str, folder: Path) -> None:
    """Link into `folder` what is installed here of some requirements, of theirs, and so on.

    Args:
        requirements: as in the metadata of a wheel.
        extra: name of the extra that is asked for; "" for none.
    """
    todo, seen = [(Requirement(line), extra) for line in requirements], set()
    while todo:
        wanted, asked = todo.pop()
        if wanted.marker and not wanted.marker.evaluate({"extra": asked}):
            continue
        found = distribution(wanted.name)
        assert wanted.specifier.contains(found.version, prereleases=True), f"{wanted}: {found.version} is installed"
        # Hooks into imports (.pth files) and programs are left where they are.
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / top
            if not link.exists() and link.suffix != ".pth":
                link.symlink_to(Path(str(found.locate_file(top))))
        for name in {"", *wanted.extras} - {name for package, name in seen if package == wanted.name}:
            seen.add((wanted.name, name))
            todo += [(Requirement(line), name) for line in found.requires or ()]


@pytest.fixture(scope="module")
def clean(wheel: ZipFile, wheel_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it requires; returns its folder of programs."""
    folder = tmp_path_factory.mktemp("clean")
    venv.EnvBuilder(with_pip=False).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    link_required(requirements(wheel), "", packages)
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--ignore-installed"]
    python = str(folder / "bin" / "python")
    run([sys.executable, "-m", "pip", "--python", python, "install", *options, str(wheel_path)], folder)
    return folder / "bin"


def requirements(wheel: ZipFile) -> list[str]:
    """What the wheel says that it needs."""
    return HeaderParser().parsestr(_read_metadata(wheel, "METADATA")).get_all("Requires-Dist")


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


#: What a newcomer does first, in a fresh environment.
_FIRST_STEPS = """
import sys, modeling_k3, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from modeling_k3 import K3Config, K3ForCausalLM, K3Tokenizer
from modeling_k3.configuration import preset_path
assert modeling_k3.__file__.startswith(sys.prefix), modeling_k3.__file__
model = K3ForCausalLM(K3Config.from_pretrained(preset_path("tiny")))
model.save_pretrained("made", with_code=True, tokenizer=K3Tokenizer.byte_level())
model = AutoModelForCausalLM.from_pretrained("made")
tokenizer = AutoTokenizer.from_pretrained("made")
prompt = tokenizer("def main(", return_tensors="pt")
assert type(model) is K3ForCausalLM and model.generate(**prompt, max_new_tokens=4).shape[1] <= 13
import modeling_k3.adapters, modeling_k3.conversion, modeling_k3.planning, modeling_k3.readiness, modeling_k3.training
print(modeling_k3.__version__)
"""


def test_first_steps_with_the_wheel_alone(clean: Path, tmp_path: Path) -> None:
    said = run([str(clean / "python"), "-c", _FIRST_STEPS], tmp_path)
    assert said.split()[-1] == modeling_k3.__version__
    assert (tmp_path / "made" / "modeling_k3.py").is_file() and (tmp_path / "made" / "README.md").is_file()


def test_only_what_the_wheel_requires_is_there(clean: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print(*map(u.find_spec, 'torch peft trl pytest tests'.split()), sep='\\n')"
    found = run([str(clean / "python"), "-c", code], tmp_path).splitlines()
    assert found[0].startswith("ModuleSpec") and found[1:] == ["None"] * 4


#: Prints modules that cannot be imported, with the reason.
_IMPORT_ALL = """
import importlib, pkgutil, modeling_k3
for found in pkgutil.walk_packages(modeling_k3.__path__, "modeling_k3."):
    try:
        importlib.import_module(found.name)
    except ImportError as error:
        print(found.name, error)
"""


def test_every_module_is_imported_with_what_the_wheel_requires(clean: Path, tmp_path: Path) -> None:
    failed = run([str(clean / "python"), "-c", _IMPORT_ALL], tmp_path).splitlines()
    # Adapters are an extra, and say so.
    assert failed and all(re.match(r"modeling_k3\.adapters\.\w+ .*\bpeft\b", line) for line in failed), failed


@pytest.mark.parametrize("extra", ["", "peft"])
def test_the_readme_runs_with_the_wheel_alone(extra: str, clean: Path, wheel: ZipFile, tmp_path: Path) -> None:
    """All blocks of it in one session, from another directory, on the trained model that is in the wheel.

    The block about LoRA says that it needs an extra, and is left out where that is not installed.
    """
    (tmp_path / "extra").mkdir()
    link_required(requirements(wheel) if extra else [], extra, tmp_path / "extra")
    blocks = [block for block in _BLOCKS if extra or "import get_peft_model" not in block]
    place = """
        import importlib.util, sys
        sys.path.append("extra")
        import modeling_k3
        assert modeling_k3.__file__.startswith(sys.prefix), modeling_k3.__file__
        assert bool(importlib.util.find_spec("peft")) is EXTRA
    """
    place = "\n".join(line.strip() for line in place.replace("EXTRA", str(bool(extra))).splitlines())
    said = run([str(clean / "python"), "-c", "\n".join([place, *blocks])], tmp_path)
    assert len(_BLOCKS) - len(blocks) == (0 if extra else 1)
    assert said.startswith("raise NotImplementedError\n") and ("trainable: " in said) is bool(extra)


def test_the_commands_of_the_readme_with_the_wheel_alone(clean: Path, tmp_path: Path) -> None:
    """Those that need no text or model of the user's and end by themselves."""
    lines = re.findall(
        r"^\.venv/bin/k3 (.*?) *(?:#.*)?$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    chosen = [line for line in lines if not re.search(r"\bMODEL\b|--train", line)]
    assert len(chosen) > 4 and any(line.startswith("generate --prompt ") for line in chosen)
    for line in chosen:
        assert run([str(clean / "k3"), *shlex.split(line)], tmp_path), line


def test_the_trained_model_is_in_the_wheel(clean: Path, wheel: ZipFile, wheel_path: Path, tmp_path: Path) -> None:
    """Byte for byte the one of the tree, without making the wheel large; `k3 demo` shows it."""
    held = {n.rpartition("/")[2]: wheel.read(n) for n in wheel.namelist() if n.startswith("modeling_k3/pico/")}
    assert held == {path.name: path.read_bytes() for path in (ROOT / "examples" / "pico").iterdir()}
    assert wheel_path.stat().st_size < 10_000_000
    assert "bits per byte" in run([str(clean / "k3"), "demo"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_of_the_wheel(clean: Path, tmp_path: Path) -> None:
    assert "convert" in run([str(clean / "k3"), "--help"], tmp_path)
    assert "verify" in run([str(clean / "k3"), "convert", "--help"], tmp_path)


def test_the_source_distribution_makes_the_same_wheel(tree: Path, wheel: ZipFile, tmp_path: Path) -> None:
    """Built in a copy of its own, unpacked elsewhere, and turned into a wheel: every file and every byte."""
    shutil.copytree(tree, tmp_path / "tree", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    code = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    name = run([sys.executable, "-c", code, str(tmp_path)], tmp_path / "tree").split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        held = {member.partition("/")[2] for member in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert {"LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.cfg"} <= held
    assert not [file for file in held if file.startswith(("tests/", ".venv", "runs"))]
    (source,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "out").mkdir()
    with ZipFile(build_wheel(source, tmp_path / "out")) as again:
        first, last = ({n: w.read(n) for n in w.namelist() if not n.endswith("RECORD")} for w in (wheel, again))
    assert first.keys() == last.keys()
    assert [name for name in first if first[name] != last[name]] == []


def test_the_changelog_has_this_version() -> None:
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heads[0] == modeling_k3.__version__


def test_installed_package_finds_its_presets(wheel: ZipFile, tmp_path: Path) -> None:
    """Read the presets from the unpacked wheel, away from this tree, without importing the model."""
    wheel.extractall(tmp_path)
    listing = {path.parent.name for path in tmp_path.glob("modeling_k3/configuration/*/config.json")}
    code = "import runpy; print(*runpy.run_path('modeling_k3/configuration/__init__.py')['preset_names']())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == listing
