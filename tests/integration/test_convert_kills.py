"""`k3 convert` killed by SIGKILL at any moment, also between write, fsync and rename: run again, the same bytes."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from modeling_k3.conversion.cli import app
from modeling_k3.conversion.convert import Options, convert
from tests.checkpoints import released

# Children are forked from a server that has imported everything: a kill must meet the conversion, not the imports.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.integration.test_convert_kills"])

#: Command -> its words; the capitals are folders.
COMMANDS = {
    "dequantize": "dequantize RELEASED TARGET --max-shard-size 60KB",
    "quantize": "quantize PLAIN TARGET --max-shard-size 60KB",
    "like": "released FLAT TARGET --like RELEASED --max-shard-size 60KB",
    "tiny": "tiny TARGET --tokens 4 --max-shard-size 100KB",
}


class Undisturbed(NamedTuple):
    """A run that nobody disturbs: its words but the target, what it writes, its calls, its seconds after the first."""

    words: list[str]
    contents: dict[str, bytes]
    calls: dict[str, int]
    seconds: float


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _command(words: list[str], name: str | None, count: int, calls: Any) -> None:
    """`k3 convert` in a process that dies by SIGKILL before the n-th call of a function of `os`."""
    torch.set_num_threads(1)
    for each in ("fsync", "replace"):
        setattr(os, each, _counted(getattr(os, each), calls[each], count if each == name else 0))
    app(words, standalone_mode=False)


def _counted(real: Any, calls: Any, deadly: int) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.value += 1
        if calls.value == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    return counted


def start(words: list[str], target: Path, name: str | None = None, count: int = 0) -> tuple[Any, dict[str, Any]]:
    calls = {each: _SERVER.Value("i", 0, lock=False) for each in ("fsync", "replace")}
    words = [str(target) if word == "TARGET" else word for word in words]
    process = _SERVER.Process(target=_command, args=(words, name, count, calls))
    process.start()
    return process, calls


def wait_for_the_first_file(process: Any, calls: dict[str, Any]) -> None:
    while not calls["replace"].value and process.is_alive():
        time.sleep(0.001)


def finish(process: Any) -> int:
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    folders = {"RELEASED": released(), "PLAIN": folder / "plain", "FLAT": folder / "flat"}
    convert(released(), folders["PLAIN"], Options(experts="bf16"))
    convert(released(), folders["FLAT"], Options(layout="flat"))
    words = [str(folders.get(word, word)) for word in COMMANDS[request.param].split()]
    process, calls = start(words, folder / "out")
    wait_for_the_first_file(process, calls)
    started = time.perf_counter()
    assert finish(process) == 0
    seconds = time.perf_counter() - started
    assert len(list((folder / "out").glob("model-*.safetensors"))) > 4
    return Undisturbed(words, contents(folder / "out"), {name: each.value for name, each in calls.items()}, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("undisturbed", COMMANDS, indirect=True, scope="module")
@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("count", [1, 2, 9, 0, -1])
def test_killed_between_write_fsync_and_rename(name: str, count: int, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """0 and -1 count from the end: before the last call and before the one before it."""
    words, expected, calls, _ = undisturbed
    count = count if count > 0 else calls[name] + count
    target = tmp_path / "out"
    assert finish(start(words, target, name, count)[0]) == -signal.SIGKILL
    # The last thing to be flushed is the parent of the renamed folder.
    assert target.exists() == (name == "fsync" and count == calls[name])
    assert not target.exists() or contents(target) == expected
    assert finish(start(words, target)[0]) == 0
    assert contents(target) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("undisturbed", COMMANDS, indirect=True, scope="module")
def test_killed_at_random_moments(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Twenty kills, some of the run that follows a killed one: in the end everything is always the same."""
    words, expected, _, seconds = undisturbed
    moments, killed = random.Random(0), 0
    for attempt in range(100):
        target = tmp_path / str(attempt) / "out"
        target.parent.mkdir()
        for _ in range(2):
            process, calls = start(words, target)
            wait_for_the_first_file(process, calls)
            time.sleep(moments.uniform(0, 0.8 * seconds))
            process.kill()
            killed += finish(process) == -signal.SIGKILL
            assert not target.exists() or contents(target) == expected
        assert finish(start(words, target)[0]) == 0
        assert contents(target) == expected
        if killed >= 20:
            break
    assert killed >= 20
