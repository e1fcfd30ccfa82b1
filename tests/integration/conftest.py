"""Small text and a small model for the tests of the demo."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.models import tiny_config


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two dozen small source files."""
    folder = tmp_path_factory.mktemp("texts")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for path in [path for path in sources if 2_000 < path.stat().st_size < 8_000][:24]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config of a model with one KDA and one MLA layer."""
    folder = tmp_path_factory.mktemp("preset")
    tiny_config(layers="KM", hidden_size=32, vocab_size=512).save_pretrained(folder)
    return str(folder)
