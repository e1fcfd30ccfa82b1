"""The README and the pages it leads to say what is true: no gaps, no dead links, sizes and names as they are."""

import re
from pathlib import Path

import pytest
import torch
import typer

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.cli import app
from modeling_k3.configuration import preset_names, preset_path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(README.splitlines()) <= 200
    assert {path.name for path in PAGES} - {"README.md"} == set(re.findall(r"\(docs/([a-z]+\.md)\)", README))


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"@[A-Z]+@|TODO|TBD", "".join(PAGES.values()))


@pytest.mark.parametrize("page", PAGES, ids=[path.name for path in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        known = {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}
        if "://" not in link and (not target.exists() or (anchor and anchor not in known)):
            dead.append(link)
    assert not dead


def test_the_first_block_follows_the_set_up_and_begins_with_the_import_that_registers() -> None:
    before, first, _ = re.split(r"```python\n(.*?)```", README, maxsplit=1, flags=re.DOTALL)
    assert "\nmake setup " in before and "\npip install -e . " in before
    assert first.startswith("import modeling_k3") and "path = trained_path()" in first


@pytest.mark.parametrize("name", sorted(set(preset_names())))
def test_sizes_are_as_stated(name: str) -> None:
    number, unit = re.search(rf"\| `{name}` \| ([\d.]+) ([MBT]) \|", README).groups()
    with torch.device("meta"):
        model = K3ForCausalLM(K3Config.from_pretrained(preset_path(name)))
    size = sum(p.numel() for p in model.parameters()) / {"M": 1e6, "B": 1e9, "T": 1e12}[unit]
    assert f"{size:.{len(number.partition('.')[2])}f}" == number


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(PAGES.values())
    assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= targets
    commands = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"\bk3 ([a-z]+)\b", text)) <= commands


def test_pictures_of_the_docs_are_small_and_shown() -> None:
    pictures = sorted((ROOT / "docs" / "pictures").iterdir())
    assert [path.name for path in pictures] == ["attention.png", "depth.png", "experts.png"]
    for path in pictures:
        assert path.stat().st_size < 400_000 and f"(pictures/{path.name})" in PAGES[ROOT / "docs" / "training.md"]


BLOCKS = {page: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for page, text in PAGES.items()}


@pytest.mark.parametrize("page", PAGES, ids=[path.name for path in PAGES])
def test_python_blocks_are_python(page: Path) -> None:
    for block in BLOCKS[page]:
        compile(block, page.name, "exec")


def test_what_a_newcomer_copies_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks of the README in one session; `tests/integration/test_wheel.py` does the same with the wheel alone."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS[ROOT / "README.md"]:
        exec(block, names)
    output = capsys.readouterr().out
    assert output.startswith("raise NotImplementedError\n") and "trainable: " in output
    assert names["model"].memory_plan.budget == 24 << 30
    assert (tmp_path / "my-k3" / "modeling_k3.py").is_file()
