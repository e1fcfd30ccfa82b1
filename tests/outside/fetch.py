"""Fetch transformers' common tests into a folder: `python -m tests.outside.fetch FOLDER`.

They are in the source distribution of the release, not in the wheel. What they import and the distribution leaves out
(tests of generation and of export, a table of config values, the start of worker processes, a text) is replaced by
stand-ins; `transformers_common.py` says what is not run for it. An existing folder of the same version is kept.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

#: Name of the package that the fetched files become; theirs, `tests`, is ours as well.
PACKAGE = "transformers_tests"
_STAND_INS = {
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    "distributed_testing_utils.py": "run_distributed = None\n",
    "fixtures/sample_text.txt": "A text of two lines.\nThe other line is longer than this: no.\n",
}


def fetch(folder: Path) -> Path:
    """Make `folder/PACKAGE` for the installed version of transformers, unless it is there.

    Returns:
        The folder of the package.

    Raises:
        subprocess.CalledProcessError: the package index cannot be reached or lacks the version.
    """
    wanted = version("transformers")
    target, mark = folder / PACKAGE, folder / "version"
    content = json.dumps([wanted, _STAND_INS])
    if mark.is_file() and mark.read_text() == content:
        return target
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--disable-pip-version-check", "-q"]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", scratch, f"transformers=={wanted}"]
        subprocess.run(command, check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(scratch, filter="data")
        (source,) = Path(scratch).glob("*/tests")
        shutil.copytree(source, target)
    for name, text in {"__init__.py": "", **_STAND_INS}.items():
        path = target / name
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        if not path.exists():
            path.write_text(text)
    mark.write_text(content)
    return target


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
