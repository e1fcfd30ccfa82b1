"""Saves that are killed: at every step that a reader could notice, and what the next save finds."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modeling_k3 import K3ForCausalLM
from tests.checkpoints import Raw, read_directory, released, text_of

#: What is under the name of a target at the end of a save, by the number of layers that were saved.
SHARDED = {"max_shard_size": "300KB"}
SINGLE: dict[str, Any] = {}
STEPS = ("fsync", "replace", "unlink")


def save_and_die(model: Any, target: Path, options: dict[str, Any], step: int) -> bool:
    """Save in a process of its own, killed before the `step`-th system call; True if it came to its end."""
    child = os.fork()
    if child == 0:
        done = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def count(*args: Any, **kwargs: Any) -> Any:
                nonlocal done
                done += 1
                if done == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return count

        try:
            for name in STEPS:
                setattr(os, name, counted(getattr(os, name)))
            model.save_pretrained(target, **options)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == 0


@pytest.mark.parametrize(
    ("old", "new"), [(SHARDED, SHARDED), (SINGLE, SHARDED), (SHARDED, SINGLE)], ids=["shards", "cut", "merge"]
)
def test_killed_at_every_step(old: dict[str, Any], new: dict[str, Any], tmp_path: Path) -> None:
    """A reader finds all of the old checkpoint, all of the new one, or an error; the next save clears up."""
    models = [K3ForCausalLM.from_pretrained(released(), num_hidden_layers=depth) for depth in (3, 2)]
    models[0].save_pretrained(tmp_path / "old", **old)
    models[1].save_pretrained(tmp_path / "new", **new)
    # By their number of layers.
    wholes = {3: read_directory(tmp_path / "old"), 2: read_directory(tmp_path / "new")}
    found: list[int | None] = []
    is_done, step = False, 0
    while not is_done:
        step += 1
        target = tmp_path / "target"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(tmp_path / "old", target)
        is_done = save_and_die(models[1], target, new, step)
        found.append(read_back(target, wholes))
        assert bool(list(target.glob(".saving-*"))) != is_done
        models[1].save_pretrained(target, **new)
        assert sorted(path.name for path in target.iterdir()) == sorted(
            path.name for path in (tmp_path / "new").iterdir()
        )
        assert read_directory(target) == wholes[2]
    assert step > 8
    # First the old one, then none, then the new one.
    assert list(dict.fromkeys(found)) == [3, None, 2]
    assert found == sorted(found, key=[3, None, 2].index)


def read_back(target: Path, wholes: dict[int, dict[str, Raw]]) -> int | None:
    """The number of layers of the checkpoint that a reader takes from a folder; None where it gets none."""
    try:
        model = K3ForCausalLM.from_pretrained(target)
    except OSError as error:
        assert "cut short" in str(error)
        return None
    depth = model.config.num_hidden_layers
    saved = target.with_name("copy")
    model.save_pretrained(saved)
    assert read_directory(saved) == wholes[depth]
    shutil.rmtree(saved)
    return depth


def test_a_save_under_way_is_left_alone(tmp_path: Path) -> None:
    """Two processes that save into one folder: the folder in use of the one is none of the other's business."""
    model = K3ForCausalLM.from_pretrained(released(), num_hidden_layers=2)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        replace, is_first = os.replace, True

        def wait(*args: Any, **kwargs: Any) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                os.write(ready[1], b"x")
                os.read(go[0], 1)
            replace(*args, **kwargs)

        try:
            os.replace = wait
            model.save_pretrained(tmp_path)
            os._exit(0)
        finally:
            os._exit(1)
    os.read(ready[0], 1)
    try:
        (tmp_path / ".saving-1").mkdir()
        model.save_pretrained(tmp_path)
        assert len(list(tmp_path.glob(".saving-*"))) == 1
    finally:
        os.write(go[1], b"x")
        status = os.waitpid(child, 0)[1]
    assert status == 0
    assert not list(tmp_path.glob(".saving-*"))
    assert read_directory(tmp_path).keys() < text_of(read_directory(released())).keys()
