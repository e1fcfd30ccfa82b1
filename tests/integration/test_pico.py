"""The trained checkpoint of the repository: small, loadable by anyone, as good as its card says, fairly measured."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from modeling_k3 import K3Tokenizer
from modeling_k3.conversion.convert import Options, convert
from modeling_k3.conversion.verify import verify
from modeling_k3.demo.corpus import load_corpus
from modeling_k3.demo.measure import sample_windows, sampled_bits_per_byte
from modeling_k3.demo.start import PICO, StartOptions, start_demo
from modeling_k3.experts import iter_experts
from modeling_k3.mxfp4 import decode, encode
from tests.models import within

REPORT = json.loads((PICO / "report.json").read_text())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """As `k3 demo` computes with it."""
    return AutoModelForCausalLM.from_pretrained(PICO, dtype="float32", expert_storage="packed").eval()


def test_it_is_a_small_release_with_packed_experts(model: PreTrainedModel) -> None:
    assert sum(path.stat().st_size for path in PICO.iterdir()) <= 8_000_000
    assert json.loads((PICO / "config.json").read_text())["model_type"] == "kimi_k3"
    assert model.config.released_config is not None
    assert {module.storage for _, module in iter_experts(model)} == {"packed"}
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    assert isinstance(tokenizer, K3Tokenizer) and len(tokenizer) == model.config.vocab_size == 512


def test_the_card_says_what_the_report_says() -> None:
    card, bits = (PICO / "README.md").read_text(), REPORT["bits_per_byte"]
    assert f"**{bits['after']:.3f}**" in card and bits["after"] <= 1.9
    assert "PSF licence" in card and "Apache-2.0" in card
    command = re.search(r"```sh\n(k3 demo --train .*)\n```", card)[1]
    assert "--qat" in command and "--save examples/pico" in command
    assert bits["after"] < bits["references"]["gzip -9"]
    assert not re.search(r"/(home|tmp|root|work)/", card + json.dumps(REPORT))


def test_it_predicts_text_it_has_not_seen(model: PreTrainedModel) -> None:
    corpus = load_corpus(held_out_names=REPORT["held_out"]["names"])
    bits = sampled_bits_per_byte(model, sample_windows(corpus.held_out, 16, 1025))
    # Another Python has other versions of these files, and 16 windows are a sample.
    assert bits < REPORT["bits_per_byte"]["after"] + 0.25


def test_the_demo_starts_from_it_and_writes_nothing(tmp_path: Path) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    before = {path.name: path.stat().st_mtime_ns for path in PICO.iterdir()}
    report = start_demo(StartOptions(threads=1), console)
    assert report["bits_per_byte"]["after"] < 2.2
    assert len(report["continuation"]) > 20
    assert "gzip -9" in console.export_text()
    assert before == {path.name: path.stat().st_mtime_ns for path in PICO.iterdir()}


def test_training_options_without_training_are_refused() -> None:
    code = "from modeling_k3.cli import main; main()"
    words = [sys.executable, "-c", code, "demo", "--steps", "3", "--fresh"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "--steps, --fresh belong to a training" in result.stderr


def test_experts_packed_and_expanded_compute_the_same(model: PreTrainedModel) -> None:
    dense = AutoModelForCausalLM.from_pretrained(PICO, dtype="float32", dequantize=True).eval()
    dense.set_experts_implementation("eager")
    ids = torch.tensor([list(b'import os\n\n\ndef main(path):\n    """Return the ')])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, dense(ids).logits)
    for _, module in iter_experts(dense):
        for stack in module.parameters():
            assert torch.equal(decode(*encode(stack), dtype=torch.float32), stack)


def test_through_dense_and_back_it_is_byte_for_byte_the_same(tmp_path: Path) -> None:
    convert(PICO, tmp_path / "dense", Options(experts="bf16", layout="flat"))
    convert(tmp_path / "dense", tmp_path / "packed", Options(experts="mxfp4", layout="released"))
    assert verify(PICO, tmp_path / "packed", tokens=0).is_same


def test_greedy_text_is_the_same_with_and_without_the_cache(model: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PICO, padding_side="left")
    batch = tokenizer(["def __init__(self", "import "], return_tensors="pt", padding=True)
    texts = []
    for use_cache in (True, False):
        ids = model.generate(**batch, max_new_tokens=24, do_sample=False, use_cache=use_cache)
        texts.append(tokenizer.batch_decode(ids))
    assert texts[0] == texts[1]


def test_it_loads_from_a_copy_without_the_repository(model: PreTrainedModel, tmp_path: Path) -> None:
    shutil.copytree(PICO, tmp_path / "elsewhere")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere", dtype="float32").eval()
    ids = torch.tensor([list(b"for i in range(")])
    with torch.no_grad():
        assert within(again(ids).logits, model(ids).logits, "same_function_fp32")
