"""Every command explains itself with an example, and what a user gets wrong is one line and exit code 2."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from modeling_k3.cli import app

ROOT = Path(__file__).parents[2]
PICO = str(ROOT / "examples" / "pico")


def leaves(command: typer.core.TyperGroup, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every command that does something."""
    found = []
    for name, child in command.commands.items():
        found += leaves(child, (*prefix, name)) if hasattr(child, "commands") else [(*prefix, name)]
    return found


COMMANDS = leaves(typer.main.get_command(app))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert result.exit_code == 0
    assert f"k3 {' '.join(words)}" in result.output.partition("Example")[2]


@pytest.mark.parametrize("words", [(), ("convert",), *COMMANDS], ids=" ".join)
def test_help_fits_a_narrow_terminal(words: tuple[str, ...]) -> None:
    """No line is cut, no value is named by a type of Python, and what an option is for has half of the width."""
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    lines = result.output.splitlines()
    assert result.exit_code == 0 and max(map(len, lines)) <= 80 and "…" not in result.output
    options = result.output.partition("─ Options")[2]
    assert "range" not in options and not re.search(r"<\w+>", options)
    assert re.search(r"--help {1,42}Show this message and exit\.", options)


def test_first_sentences_are_uniform() -> None:
    for words in COMMANDS:
        command = typer.main.get_command(app)
        for word in words:
            command = command.commands[word]
        assert command.help and command.help[0].isupper() and command.help.rstrip()[-1] == ".", words
        for option in command.params:
            text = getattr(option, "help", None)
            if option.name != "help":
                assert text and text.endswith("."), (words, option.name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate nowhere --prompt x", "nowhere is not a folder"),
        (f"generate {PICO} --prompt x --top-p 2", "top_p must be above 0 and at most 1"),
        (f"chat {PICO} --tools nofile.json", "Expected is a JSON file, or 'stub'"),
        ("plan kimi-k4", "is no preset (kimi-k3"),
        ("plan kimi-k3 --budget 24Gig", "is no size; allowed are"),
        ("plan kimi-k3 --budget 1MiB", "it needs"),
        ("plan tiny --mode walk", "allowed are ['infer'"),
        ("demo --steps 3", "give --train as well"),
        (f"demo --train --model {PICO}", "leave out --train"),
        ("doctor --device gpu", "device='gpu' is not on this machine; allowed are ['cpu'"),
        (f"precision {PICO} --text nowhere", "--text nowhere is no file. Expected is plain text, or a .jsonl"),
        (f"precision {PICO} --text README.md --fast quick", "allowed are ['auto'"),
        ("convert flat {empty} {out}", "holds no config.json; expected is a folder of save_pretrained"),
        (f"convert shard {PICO} {{out}} --max-shard-size lots", "is no size; allowed are"),
        (f"convert flat {PICO} {PICO}", "which is never changed"),
        ("plan --bugdet 24GiB", "k3 plan: no such option --bugdet (Possible options: --budget); see k3 plan --help"),
        ("plan", "k3 plan: missing argument 'model'; see k3 plan --help"),
        ("plan tiny --budget", "k3 plan: option '--budget' requires an argument; see k3 plan --help"),
        ("plan tiny small", "k3 plan: got unexpected extra argument(s) (small); see k3 plan --help"),
        ("plna", "k3: no such command 'plna'. Did you mean 'plan'? See k3 --help"),
        ("--budget 3", "k3: no such option --budget; see k3 --help"),
        ("chat x --effort lots", "k3 chat: invalid value for '--effort': 'lots' is not one of 'low', "),
        ("generate x --prompt y --seed a", "'--seed': it should be a valid integer"),
        (
            "convert flat nowhere {out}",
            "k3 convert flat: invalid value for 'source': dir 'nowhere' does not exist; see",
        ),
        (f"convert tokenizer {PICO} {{out}}", "holds no tiktoken.model"),
        ("convert tiny {out} --preset gigantic", "the presets are"),
    ],
)
def test_what_is_wrong_is_one_line(words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    arguments = words.format(empty=tmp_path / "empty", out=tmp_path / "out").split()
    result = CliRunner().invoke(app, arguments)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 2, result.output
    assert len(lines) == 1 and said in lines[0], result.output
    assert "Usage:" not in result.output
    assert not (tmp_path / "out").exists()
