"""The status page claims no more than what can be looked up: its words, its files, its commands, its refusals."""

import json
import re
from pathlib import Path

import pytest
import torch

from modeling_k3 import K3ForCausalLM
from tests.models import tiny_config

ROOT = Path(__file__).parents[2]
STATUS = (ROOT / "docs" / "status.md").read_text()
CARD = (ROOT / "model_card.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in STATUS.splitlines()
    if line.startswith("| ") and not line.startswith(("| system", "| feature"))
]


def evidence(text: str) -> list[str]:
    """What in a cell proves something: paths of tests and benchmarks, make targets."""
    return re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py|make [a-z-]+)`", text)


def is_there(name: str) -> bool:
    """Whether a file or a make target exists."""
    if name.startswith("make "):
        return re.search(rf"^{name.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    return (ROOT / name).is_file()


def test_three_words_only() -> None:
    assert len(ROWS) > 25 and {row[1] for row in ROWS} == {"GA", "loadable", "absent"}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_claim_names_what_exists(row: list[str]) -> None:
    found = evidence(row[2])
    assert not [name for name in found if not is_there(name)]
    if row[1] == "GA":
        assert found, f"{row[0]}: GA needs a test or a command"


def test_no_gpu_is_verified_without_its_check() -> None:
    for name, status, proof in ROWS:
        is_gpu = re.search(r"\bGPUs?\b|CUDA|MPS", name)
        ran = re.search(r"gpu-check` ran on .+, \d{4}-\d\d-\d\d", proof)
        assert not (is_gpu and status == "GA" and not ran), name


def test_attention_that_needs_a_gpu_says_so_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for name in ("flash_attention_2", "flash_attention_3"):
        with pytest.raises((ValueError, ImportError), match=r"(?i)flash"):
            K3ForCausalLM._from_config(tiny_config(), attn_implementation=name)
    assert K3ForCausalLM._from_config(tiny_config(), attn_implementation="flex_attention") is not None


def test_every_system_has_a_line() -> None:
    for name in ("Linux, CPU", "macOS, CPU", "macOS, MPS", "Windows"):
        assert any(row[0] == name for row in ROWS), name
    assert "kernelized decomposed attention" in STATUS


def test_figures_on_the_card_name_commands_that_exist() -> None:
    table = CARD.split("## Measured")[1]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12 and re.search(r"\d+ November 2026|\d{4}-\d\d-\d\d", table)
    for what, _, command in rows:
        files = re.findall(r"(?:benchmarks|tests)/[\w/.]+", command)
        assert files or "k3 " in command, what
        assert not [name for name in files if not (ROOT / name).exists()], what


def test_figures_on_the_card_are_the_measured_ones() -> None:
    results = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    decode = {
        row["contender"]: row["milliseconds"]
        for row in results["cache"]["rows"]
        if row["part"] == "decode" and row["context"] == 32768
    }
    load = {name: found["load_s"] for name, found in results["load"]["results"].items()}
    lora = {name: found["peak_over_checkpoint"] for name, found in results["lora"]["contenders"].items()}
    whole, forward = results["full_size_load"]["load"], results["full_size"]["forward"]
    balance = {name: found["steps_to_goal"] for name, found in results["balance"]["results"].items()}
    for figure in (
        f"{decode['absorbed']:.0f}; {decode['expanded']:.0f}; {decode['transformers Kimi Linear']:,.0f} ms",
        f"{load['mapped']:.1f}, {load['packed']:.1f}, {load['dense']:.0f}; {load['transformers']:.0f} s",
        f"{lora['packed LoRA']:.2f}; {lora['bf16 LoRA']:.2f}",
        f"{whole['load_s']:.1f} s, {whole['peak_grown_resident_bytes'] / 1e9:.2f} GB",
        f"{forward['forward_s']:,.0f} s*, {forward['peak_grown_anonymous_bytes'] / 1e9:.2f} GB",
        f"within {100 * max(results['memory']['worst_error'].values()):.0f} %",
        f"| {balance['quantile']}; {balance['sign, rate 0.01']} |",
        " / ".join(f"{run['cost_of_packing']:+.4f}" for run in reversed(results["qat"]["runs"])),
        f"{results['tokenizer']['texts']['standard library']['k3_s']:.2f} s",
    ):
        assert figure in CARD, figure
