"""The examples of use run with the small trained model, as a user would start them; the notebook runs cell by cell.

Those that train at length (pretrain, sft, dpo) are in `test_examples.py`, on a toy.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hub_server import serve
from tests.models import BOUNDS
from tests.tour import NOTEBOOK, code_cells, run_cells, stored

EXAMPLES = Path(__file__).parents[2] / "examples"
PICO = EXAMPLES / "pico"
NAMES = "generate pipeline lora lora_experts low_bit_offload attention_maps evaluation".split()


def test_generate_streams_a_continuation(
    example: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for arguments in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--temperature", "0"]):
        example("generate")["main"](["--prompt", "import ", "--max-new-tokens", "24", *arguments])
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("import ") and len(text) > 20 for text in texts)
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_pipeline_answers_every_prompt(
    example: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["import ", "class Error(Exception):", "x"]
    example("pipeline")["main"]([*prompts, "--max-new-tokens", "12"])
    written = capsys.readouterr().out.split("\n-- ")[1:]
    for text, prompt in zip(written, prompts, strict=True):
        assert text.startswith(prompt) and len(text) > len(prompt) + 6


def test_lora_is_merged_into_released_names(
    tmp_path: Path, example: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    example("lora")["main"](["--steps", "6", "--rank", "2", "--output", str(tmp_path / "merged")])
    output = capsys.readouterr().out
    assert "trainable: " in output and "block_sparse_moe.experts" in output
    before, after = (float(loss) for loss in re.findall(r"^(?:before|after) +loss ([\d.]+) on texts", output, re.M))
    assert after < before - 0.05
    (file,) = (tmp_path / "merged").glob("*.safetensors")
    with safe_open(file, "pt") as opened, safe_open(PICO / "model.safetensors", "pt") as released:
        names, of_release = set(opened.keys()), set(released.keys())
    # What serving engines read: the released names, of which only the packed forms of expert weights are gone.
    plain = {re.sub(r"weight_(packed|scale)$", "weight", name) for name in of_release if "weight_shape" not in name}
    assert names == plain
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    texts = [f"# {question}\n# {answer}\n" for question, answer in example("real_text")["questions"]()[:8]]
    losses = []
    for path in (PICO, tmp_path / "merged"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        with torch.no_grad():
            losses.append(sum(model(row, labels=row).loss.item() for row in ids))
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("name", "words", "named"),
    [
        *((name, ["--model", "nowhere"], "--model nowhere: ") for name in NAMES),
        ("push_to_hub", ["me/x", "--model", "nowhere"], "--model nowhere: "),
        ("chat", ["nowhere", "hello"], "nowhere: "),
        *(
            ("pretrain", [option, "nowhere"], "--model, --config and ")
            for option in ("--model", "--tokenizer", "--config")
        ),
    ],
)
def test_a_model_that_is_not_there_is_one_line(
    name: str,
    words: list[str],
    named: str,
    example: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in {"evaluation": ["lm_eval"], "lora": ["peft"], "lora_experts": ["peft"]}.get(name, []):
        pytest.importorskip(package)
    # Where nothing is called "nowhere".
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        example(name)["main"](words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 2 and f": error: {named}" in last and "one of the hub. " in last
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits", ["4", "8", "16"])
def test_low_bits_with_experts_in_the_files(
    bits: str, example: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    if bits != "16":
        pytest.importorskip("bitsandbytes")
    more = ["--disk-layers", "2"] if bits == "16" else []
    example("low_bit_offload")["main"](["--bits", bits, "--expert-memory", "300KB", "--max-new-tokens", "8", *more])
    output = capsys.readouterr().out
    assert {"4": "'Linear4bit'", "8": "'Linear8bitLt'", "16": "{'Linear': 49}"}[bits] in output
    assert 0 < int(re.search(r"at most ([\d,]+) bytes", output)[1].replace(",", "")) <= 300_000


def test_push_to_hub_uploads_what_was_shown(tmp_path: Path, example: Callable[[str], dict[str, Any]]) -> None:
    """With nothing changed but the address of the hub."""
    arguments = ["somebody/pico", "--license", "apache-2.0"]
    example("push_to_hub")["main"]([*arguments, "--preview", str(tmp_path / "preview")])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with serve() as hub:
        environment = {**kept, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_test", "HOME": str(tmp_path)}
        command = [sys.executable, str(EXAMPLES / "push_to_hub.py"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        files = hub.files("somebody/pico")
    shown = {path.name: path.read_bytes() for path in (tmp_path / "preview").iterdir()}
    files.pop(".gitattributes", None)
    assert files == shown
    assert json.loads(files["config.json"])["auto_map"]["AutoModelForCausalLM"] == "modeling_k3.K3ForCausalLM"
    row = rb"\| bits per byte of held-out text \| 1\.744 \| k3 demo --all --model pico \| \w.+ \| \d{4}-\d\d-\d\d \|"
    assert re.search(row, files["README.md"])
    for path in (EXAMPLES.parent, tmp_path, Path.home()):
        assert not [name for name, data in files.items() if f"{path}/".encode() in data], path


def test_evaluation_agrees_with_the_model(
    example: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    script = example("evaluation")
    script["main"](["--limit", "2", "--max-length", "8192"])
    found = {name: float(value) for name, value in re.findall(r"(\w+) +([\d.]+)$", capsys.readouterr().out, re.M)}
    assert set(found) == {"bits_per_byte", "acc", "acc_norm"}
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32),
        AutoTokenizer.from_pretrained(PICO),
    )
    nats = size = 0.0
    for row in script["held_out"](str(PICO))[:2]:
        # Each fits into one window.
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(row["page"])["input_ids"]]])
        with torch.no_grad():
            nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        size += len(row["page"].encode())
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), abs=1e-3)


def test_evaluation_without_the_harness_says_what_to_install(
    example: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r"lm_eval.*pip install 'modeling_k3\[eval\]'$"):
        example("evaluation")


def test_pictures_of_attention_depth_and_experts(
    tmp_path: Path, example: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: dict[str, Figure] = {}
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (figures.update({path.stem: self}), save(self, path)))
    words = ["--text", "x = 1\n" * 20, "--heads", "2", "--layers", "3", "1", "2", "--output", str(tmp_path)]
    example("attention_maps")["main"](words)
    assert set(figures) == {"attention", "depth", "experts"}
    for name, figure in figures.items():
        assert imread(tmp_path / f"{name}.png")[..., :3].std() > 0.01
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
        assert min(text.get_fontsize() for text in texts) >= 9
    # Two heads of three layers, and one scale of colours for all layers of a kind.
    labels = [place.get_ylabel() for place in figures["attention"].axes]
    assert [label for label in labels if label.startswith("layer")] == ["layer 1 KDA", "layer 2 KDA", "layer 3 MLA"]
    assert [label for label in labels if label.startswith("weight")] == ["weight, MLA", "weight, KDA"]


def test_the_tour_runs_and_shows_what_it_prints() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    printed = run_cells(notebook)

    def words(text: str) -> str:
        # Numbers differ by machine, in their last digits at least, and with them what aligns them.
        return re.sub(r" +", " ", re.sub(r"\d[\d.,e+-]*", "#", text))

    first, *others = map(stored, code_cells(notebook))
    # What is drawn may differ from machine to machine as well.
    assert first.startswith("def __init__(self, name):\n") and printed[0].startswith("def __init__(self, name):\n")
    assert list(map(words, others)) == list(map(words, printed[1:])), "run: python -m tests.tour"
    output = "".join(printed)
    differences = [float(value) for value in re.findall(r": (\d\.\de-\d\d)$", output, re.M)]
    assert len(differences) == 3 and max(differences) < BOUNDS["same_function_fp32"].bound
    assert "1 of them end a message" in output and "equal bits: True" in output
    assert "4,392,204 parameters; experts packed" in output
