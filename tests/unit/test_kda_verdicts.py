"""Verdicts survive the process, belong to versions, and never get in the way."""

from pathlib import Path

import pytest
import torch

from modeling_k3 import kda_verdicts as verdicts
from modeling_k3.kda_verdicts import Verdict

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verdicts, "_seen", {})


def test_a_verdict_is_found_again_in_another_process() -> None:
    key = verdicts.verdict_key("fla", CPU, torch.bfloat16)
    assert verdicts.read_verdict(key) is None
    verdicts.write_verdict(key, Verdict(False, "wrong"))
    verdicts.forget_verdicts()
    assert verdicts.read_verdict(key) == Verdict(False, "wrong")
    other = verdicts.verdict_key("fla", CPU, torch.float32)
    assert other != key and verdicts.read_verdict(other) is None
    verdicts.write_verdict(other, Verdict(True, "fine"))
    verdicts.forget_verdicts()
    assert verdicts.read_verdict(key) == Verdict(False, "wrong")


def test_the_key_holds_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = verdicts.verdict_key("fla", CPU, torch.bfloat16)
    assert f"torch {torch.__version__}" in before and "fla" in before
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert verdicts.verdict_key("fla", CPU, torch.bfloat16) != before


@pytest.mark.parametrize("content", ["", "[]", "{", '{"k": 3}', '{"k": {"passed": "yes"}}'])
def test_a_damaged_file_is_no_verdict(content: str) -> None:
    file = verdicts.verdict_file()
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert verdicts.read_verdict("k") is None
    verdicts.write_verdict("k", Verdict(True, "fine"))
    verdicts.forget_verdicts()
    assert verdicts.read_verdict("k") == Verdict(True, "fine")


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    verdicts.write_verdict("k", Verdict(True, "fine"))
    assert verdicts.read_verdict("k") == Verdict(True, "fine")
