"""Helpers for tests of uploads: another process that has, or cannot import, this package."""

import ast
import json
import os
import subprocess
import sys
import textwrap
import venv
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.layout_source import ROOT, iter_imports
from tests.models import max_diff, token_ids
from tests.tolerances import bound

BYTES = {"vocab_size": 512, "pad_token_id": 511, "bos_token_id": 256, "eos_token_id": 257}
IDS = token_ids(2, 9)
#: Makes the package impossible to import, whatever lies on the path.
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "modeling_k3":
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)")
sys.meta_path.insert(0, Block())
"""
#: Loads argv[1], and writes what it computes into argv[2] and the model itself into argv[3].
USE = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
source, results, copy = sys.argv[1:4]
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, dtype="auto")
assert type(model).__module__.startswith("transformers_modules."), type(model)
assert "modeling_k3" not in sys.modules
ids = load_file(results + "/ids")["ids"]
found = {"logits": model(ids).logits.detach(), "tokens": model.generate(ids, max_new_tokens=6, do_sample=False)}
save_file(found, results + "/found")
forms = sorted({m.storage for m in model.modules() if hasattr(m, "storage")})
model.save_pretrained(copy)
try:
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True)
except Exception as error:
    print(forms, "no tokenizer")
else:
    tokenizer.save_pretrained(copy)
    print(forms, type(tokenizer).__name__, tokenizer("def x")["input_ids"], model.generation_config.eos_token_id)
before = model(ids).logits.detach()
model.train()
model(ids, labels=ids).loss.backward()
torch.optim.SGD(model.parameters(), lr=1.0).step()
model.eval()
assert not torch.equal(model(ids).logits, before)
"""


def run(code: str, *arguments: str, home: Path, python: str = sys.executable, **environment: str) -> str:
    """Run code in a fresh interpreter, in an empty home, with nothing of the hub's settings but what is given."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS"))}
    settings = {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", **environment}
    settings.pop("PYTHONPATH", None)
    settings |= {k: v for k, v in environment.items() if k == "PYTHONPATH"}
    command = [python, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, env=settings, cwd=home, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def python_without(package: str, folder: Path) -> str:
    """An interpreter in an environment that has everything of this one but one package."""
    held = folder / "packages"
    held.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith(package):
            (held / path.name).symlink_to(path)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder / "venv")
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "rest.pth").write_text(f"{held}\n")
    return str(folder / "venv" / "bin" / "python")


def ask(tmp_path: Path) -> str:
    """A folder with the ids that another process is asked about."""
    (tmp_path / "results").mkdir()
    save_file({"ids": IDS}, tmp_path / "results" / "ids")
    return str(tmp_path / "results")


def check_answer(results: str, model: Any) -> None:
    found = load_file(Path(results) / "found")
    assert max_diff(found["logits"].float(), model(IDS).logits.detach().float()) < bound("other_process_logits")
    assert torch.equal(found["tokens"], model.generate(IDS, max_new_tokens=6, do_sample=False))


def own_entries(text: str) -> dict[str, Any]:
    """A tokenizer's config without what the library notes about the loading."""
    return {k: v for k, v in json.loads(text).items() if k not in ("is_local", "local_files_only")}


def needed_files() -> set[str]:
    """The flat files that a model and a tokenizer are made of."""
    found, open_ = set(), {"modeling_k3", "tokenization_k3"}
    while open_:
        name = open_.pop()
        found.add(f"{name}.py")
        tree = ast.parse((ROOT / "modeling_k3" / f"{name}.py").read_text(encoding="utf-8"))
        near = {each.module for each in iter_imports(tree) if each.level == 1 and each.module}
        open_ |= {each for each in near if f"{each}.py" not in found}
    return found


def logged_in(home: Path) -> Path:
    """A home as `hf auth login` leaves it."""
    place = home / ".cache" / "huggingface"
    place.mkdir(parents=True, exist_ok=True)
    (place / "token").write_text("hf_test")
    return home
