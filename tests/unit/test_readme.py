"""The README says what is true: no gaps, no dead links, sizes and names as they are."""

import re
from pathlib import Path

import pytest
import torch
import typer

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.cli import app
from modeling_k3.configuration import preset_names, preset_path
from modeling_k3.demo.start import PICO

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"@[A-Z]+@|TODO|TBD", README)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links and not [link for link in links if "://" not in link and not (ROOT / link).exists()]


def test_the_first_block_begins_with_the_import_that_registers() -> None:
    first = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert first.startswith("import modeling_k3") and f'"{PICO.relative_to(ROOT)}"' in first


@pytest.mark.parametrize("name", sorted(set(preset_names())))
def test_sizes_are_as_stated(name: str) -> None:
    number, unit = re.search(rf"\| `{name}` \| ([\d.]+) ([MBT]) \|", README).groups()
    with torch.device("meta"):
        model = K3ForCausalLM(K3Config.from_pretrained(preset_path(name)))
    size = sum(p.numel() for p in model.parameters()) / {"M": 1e6, "B": 1e9, "T": 1e12}[unit]
    assert f"{size:.{len(number.partition('.')[2])}f}" == number


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) <= targets
    commands = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"\bk3 ([a-z]+)\b", README)) <= commands


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n", 1)[0][:60] for block in BLOCKS])
def test_python_blocks_are_python(block: str) -> None:
    compile(block, "README.md", "exec")


def test_what_a_newcomer_copies_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first block, and those on LoRA and memory after it, in one session."""
    pytest.importorskip("peft")
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    chosen = [BLOCKS[0], *(block for block in BLOCKS if "get_peft_model" in block or "plan_memory" in block)]
    assert len(chosen) == 3
    for block in chosen:
        exec(block, names)
    output = capsys.readouterr().out
    assert output.startswith("def main(") and "trainable: " in output
    assert names["options"]["expert_storage"] == "mapped"
