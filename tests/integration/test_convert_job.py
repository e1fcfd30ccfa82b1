"""A conversion that was finished and damaged since, two at a time, or refused: nothing is lost or taken for right."""

import fcntl
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modeling_k3 import K3Config
from modeling_k3.configuration import preset_path
from modeling_k3.conversion import job as jobs
from modeling_k3.conversion import verify as verifying
from modeling_k3.conversion.cli import app
from modeling_k3.conversion.convert import Options, convert, describe, plan_conversion
from modeling_k3.conversion.job import RECORD, run_job
from modeling_k3.conversion.tiny import GOLDEN, make_tiny
from modeling_k3.conversion.verify import verify
from tests.checkpoints import INDEX, change, copy_of, released

SHARD = "model-00002-of-00003.safetensors"
FLAT = Options(layout="flat")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path: Path, at: int) -> None:
    blob = bytearray(path.read_bytes())
    blob[at] ^= 1
    path.write_bytes(blob)


@pytest.mark.parametrize("name", [SHARD, INDEX, "config.json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: flip(path, -1),
        lambda path: flip(path, path.stat().st_size // 2),
        lambda path: path.write_bytes(b""),
    ],
    ids=["cut", "last bit", "bit", "empty"],
)
def test_a_damaged_target_is_not_called_done(damage: Any, name: str, tmp_path: Path) -> None:
    out = convert(released(), tmp_path / "out", FLAT)
    before = contents(out)
    damage(out / name)
    damaged = contents(out)
    with pytest.raises(FileExistsError, match=f"1 of its files are not as they were written: {name}"):
        convert(released(), out, FLAT)
    assert contents(out) == damaged
    (out / name).unlink()
    seen: list[tuple[int, int]] = []
    convert(released(), out, FLAT, lambda done, total: seen.append((done, total)))
    assert contents(out) == before
    assert all(0 <= done <= total for done, total in seen)


def test_only_what_is_missing_is_written_again(tmp_path: Path) -> None:
    out = convert(released(), tmp_path / "out", FLAT)
    before, others = contents(out), [path for path in out.iterdir() if path.name not in (SHARD, RECORD)]
    times = {path: path.stat().st_mtime_ns for path in others}
    (out / SHARD).unlink()
    (out / "notes.txt").write_text("of the user")
    convert(released(), out, FLAT)
    assert {path: path.stat().st_mtime_ns for path in others} == times
    assert contents(out) == {**before, "notes.txt": b"of the user"}


def test_a_golden_file_is_part_of_the_result(tmp_path: Path) -> None:
    config = K3Config.from_pretrained(preset_path("tiny"))
    out = make_tiny(tmp_path / "out", config, tokens=4)
    before = contents(out)
    flip(out / GOLDEN, -1)
    with pytest.raises(FileExistsError, match=GOLDEN):
        make_tiny(out, config, tokens=4)
    (out / GOLDEN).unlink()
    make_tiny(out, config, tokens=4)
    assert contents(out) == before


def test_a_record_that_names_other_files(tmp_path: Path) -> None:
    out = convert(released(), tmp_path / "out", FLAT)
    record = json.loads((out / RECORD).read_text())
    record["files"].pop(SHARD)
    (out / RECORD).write_text(json.dumps(record))
    with pytest.raises(FileExistsError, match="exists already"):
        convert(released(), out, FLAT)


def test_nobody_comes_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process is kept out before and after the rename, and the lock is gone in the end."""
    job = plan_conversion(released(), tmp_path / "out", FLAT)
    replace, tried = os.replace, []

    def attempt() -> None:
        with pytest.raises(FileExistsError, match="another process"):
            run_job(plan_conversion(released(), tmp_path / "out", FLAT))
        tried.append(job.target.exists())

    def watched(source: Any, target: Any) -> None:
        is_last = Path(source) == job.folder
        if is_last:
            attempt()
        replace(source, target)
        if is_last:
            attempt()

    monkeypatch.setattr("modeling_k3.conversion.job.os.replace", watched)
    run_job(job)
    assert tried == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_lock_that_its_owner_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before and locked after the removal it would keep nobody out."""
    path, flock, calls = tmp_path / "out.lock", fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            path.unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with jobs._locked(tmp_path / "out"):
        assert len(calls) == 2
        with pytest.raises(FileExistsError, match="another process"), jobs._locked(tmp_path / "out"):
            pass
    assert not path.exists()


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "letters.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not of a conversion"):
        convert(released(), tmp_path / "out", FLAT)
    assert contents(partial) == {"letters.txt": b"mine"}


@pytest.mark.parametrize("options", [FLAT, Options(experts="bf16"), Options(vision=False), Options(max_shard_size=1)])
def test_padding_that_is_not_zero(options: Options, tmp_path: Path) -> None:
    """Loading refuses it, so a conversion does before it writes."""
    source = copy_of(tmp_path / "source")
    name = "language_model.model.layers.1.self_attn.A_log"
    change(source, lambda each, raw: {each: raw._replace(data=raw.data[:-1] + b"?") if each == name else raw})
    with pytest.raises(ValueError, match=rf"{name} has \d+ entries for \d+ heads, and not all of the rest are zero"):
        convert(source, tmp_path / "out", options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    with pytest.raises(OSError, match=r"GB are to be written to .*, where 0\.00 GB are free"):
        convert(released(), tmp_path / "out", FLAT)
    assert not list(tmp_path.iterdir())
    assert " of 1 kB free -> " in describe(plan_conversion(released(), tmp_path / "out", FLAT))


# -- verify ---------------------------------------------------------------------------------------------------------


def test_verify_counts_vision_on_one_side(tmp_path: Path) -> None:
    convert(released(), tmp_path / "text", Options(vision=False))
    report = verify(released(), tmp_path / "text", tokens=0)
    assert report.is_same
    assert report.vision_first > 0 == report.vision_second
    assert f"{report.vision_first} vision and projector tensors only in the first" in "\n".join(report.lines())
    assert verify(tmp_path / "text", released(), tokens=0).vision_second == report.vision_first
    # A vision part that lost a tensor is no text-only checkpoint.
    other = copy_of(tmp_path / "other")
    lost: list[str] = []

    def rule(name: str, raw: Any) -> dict[str, Any]:
        is_lost = not lost and not name.startswith("language_model.")
        lost.extend([name] if is_lost else [])
        return {} if is_lost else {name: raw}

    change(other, rule)
    report = verify(released(), other, tokens=0)
    assert (report.only_first, report.vision_first, report.is_same) == (lost, 0, False)


def test_verify_of_more_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that do not fit are left out with the reason; tensors are compared all the same."""
    monkeypatch.setattr(verifying, "_compare_logits", lambda *args: pytest.fail("the model was loaded"))
    monkeypatch.setattr(verifying, "available_memory", lambda: 10_000_000)
    report = verify(released(), released())
    assert report.is_same
    assert report.logits_max_abs is None
    assert report.identical > 0
    needed = verifying._memory(verifying._places(verifying.Checkpoint.from_directory(released())))
    assert f"need {needed:,} bytes of memory" in list(report.lines())[-1]
    assert "10,000,000 bytes are available" in list(report.lines())[-1]
    assert verify(released(), released(), tokens=0).without_logits is None


def test_memory_of_logits_is_the_model_without_experts() -> None:
    shapes = {
        "lm_head.weight": (10, 4),
        "layers.1.block_sparse_moe.shared_experts.up_proj.weight": (5, 4),
        "layers.1.block_sparse_moe.experts.3.w1.weight_packed": (1000, 1000),
        "vision_tower.a": (1000, 1000),
    }
    assert verifying.float32_memory(shapes.items()) == 4 * (40 + 20) + verifying._WORKSPACE


def test_values_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = copy_of(tmp_path / "other")
    name = "language_model.model.embed_tokens.weight"
    change(other, lambda each, raw: {each: raw._replace(data=raw.data[::-1]) if each == name else raw})
    whole = verify(released(), other, tokens=0)
    monkeypatch.setattr(verifying, "_PIECE", 7)
    assert verify(released(), other, tokens=0) == whole
    assert len(whole.different) == 1


def test_golden_logits_of_more_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modeling_k3.conversion.tiny.available_memory", lambda: 1000)
    result = CliRunner().invoke(app, ["tiny", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "allowed is tokens=0" in result.output
    assert not list(tmp_path.iterdir())
    assert CliRunner().invoke(app, ["tiny", str(tmp_path / "out"), "--tokens", "0"]).exit_code == 0
