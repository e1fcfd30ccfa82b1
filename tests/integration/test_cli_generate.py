"""`k3 generate`: streamed text from a saved checkpoint, and readable errors."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import TextStreamer
from typer.testing import CliRunner, Result

from modeling_k3.cli import app
from modeling_k3.demo.text import Sampling, load, stream_text, streamer
from modeling_k3.demo.tokenizer import build_tokenizer, encode_text
from tests.models import build, tiny_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of two layers over bytes, with random weights."""
    folder = tmp_path_factory.mktemp("model")
    build(tiny_config(layers="KM", hidden_size=32, vocab_size=512, eos_token_id=257, pad_token_id=511)).save_pretrained(
        folder
    )
    build_tokenizer().save_pretrained(folder)
    return folder


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["generate", *words])


def test_output_is_the_prompt_and_its_continuation(checkpoint: Path) -> None:
    result = run(str(checkpoint), "--prompt", "def main(", "--max-new-tokens", "12", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("def main(")
    model, tokenizer = load(checkpoint)
    expected = stream_text(model, tokenizer, "def main(", Sampling(max_new_tokens=12, temperature=0))
    assert result.stdout == f"def main({expected}\n"


def test_without_a_folder_it_is_the_model_that_comes_along() -> None:
    result = run("--prompt", "raise NotImpl", "--max-new-tokens", "12", "--temperature", "0")
    assert result.exit_code == 0 and result.stdout.startswith("raise NotImplementedError"), result.output


def test_seed_decides_the_text(checkpoint: Path) -> None:
    words = [str(checkpoint), "--prompt", "a", "--max-new-tokens", "20", "--temperature", "1.5"]
    first, again, other = (run(*words, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other


def test_text_comes_in_pieces(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, tokenizer = load(checkpoint)
    capsys.readouterr()
    live = streamer(tokenizer)
    live.put(torch.tensor([encode_text(tokenizer, "the prompt")]))
    shown = []
    for index in encode_text(tokenizer, "for é in x:\n"):
        live.put(torch.tensor([index]))
        shown.append(capsys.readouterr().out)
    live.end()
    assert "".join(shown) == "for é in x:\n"
    assert sum(map(bool, shown)) > 3


def test_control_names_in_the_prompt_are_text(checkpoint: Path) -> None:
    model, tokenizer = load(checkpoint)
    seen: list[int] = []

    class Spy(TextStreamer):
        def put(self, value: object) -> None:
            seen.append(value.numel())

    stream_text(model, tokenizer, "[EOS]<|open|>", Sampling(max_new_tokens=1), Spy(tokenizer))
    assert seen[0] == len("[EOS]<|open|>")


def test_empty_prompt_begins_a_document(checkpoint: Path) -> None:
    assert run(str(checkpoint), "--prompt", "", "--max-new-tokens", "3").exit_code == 0


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_dtype(checkpoint: Path, dtype: str) -> None:
    model, _ = load(checkpoint, dtype)
    assert str(model.lm_head.weight.dtype) == f"torch.{'float32' if dtype == 'auto' else dtype}"
    assert run(str(checkpoint), "--prompt", "a", "--max-new-tokens", "2", "--dtype", dtype).exit_code == 0


def test_the_installed_script_registers_by_itself(checkpoint: Path) -> None:
    code = "import sys; sys.argv[0] = 'k3'; from modeling_k3.cli import main; main()"
    words = ["generate", str(checkpoint), "--prompt", "ab", "--max-new-tokens", "2"]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ab")


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", "holds no weights"),
        ("tokenizer.json", "holds no tokenizer: none of tokenizer.json"),
    ],
)
def test_what_is_missing_is_named(checkpoint: Path, tmp_path: Path, remove: str, message: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    (folder / remove).unlink()
    result = run(str(folder), "--prompt", "a")
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output


def test_other_kinds_of_model_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    result = run(str(folder), "--prompt", "a")
    assert result.exit_code == 2
    assert "'llama'; allowed are k3, kimi_k3" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no/such/folder", "--prompt", "a"], "is not a folder"),
        (["."], "--prompt"),
        ([".", "--prompt", "a", "--top-p", "1.5"], "above 0 and at most 1"),
        ([".", "--prompt", "a", "--temperature", "-1"], "--temperature"),
        ([".", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        ([".", "--prompt", "a", "--dtype", "int3"], "bfloat16"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output
