"""Small text, small models and the examples, which several files share."""

import runpy
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modeling_k3 import K3ForCausalLM, K3Tokenizer
from tests.models import build, tiny_config
from tests.uploads import BYTES

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Load an example as its own script would be."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))


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


@pytest.fixture(scope="module")
def byte_model() -> K3ForCausalLM:
    return build(tiny_config(**BYTES)).requires_grad_(False)


@pytest.fixture(scope="module")
def uploaded(byte_model: K3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that an upload has."""
    path = tmp_path_factory.mktemp("upload") / "my-k3"
    byte_model.save_pretrained(path, with_code=True, tokenizer=K3Tokenizer.byte_level())
    return path
