"""Checkpoint files that other programs replace or change while a model that was loaded from them is in use."""

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import K3ForCausalLM
from modeling_k3.checkpoint import Checkpoint
from tests.checkpoints import MIXED, Raw, change, copy_of, read_directory, released

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])
#: Ways to leave tensors in their files.
LAZY = {
    "mapped": {"expert_storage": "mapped"},
    "disk": {"device_map": {"": "disk"}},
    "dense on disk": {"device_map": MIXED, "expert_storage": "dense"},
}


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return copy_of(tmp_path / "checkpoint")


def load(directory: Path, lazy: str) -> Any:
    return K3ForCausalLM.from_pretrained(directory, experts_implementation="eager", **LAZY[lazy])


def flip(name: str, raw: Raw) -> dict[str, Raw]:
    """Other weights of the same size."""
    return {name: raw if "A_log" in name else raw._replace(data=raw.data[::-1])}


def replaced(directory: Path) -> None:
    """Another tool's files in the place of all of them, by renames."""
    other = directory.with_name("other")
    change(copy_of(other), flip)
    for path in other.iterdir():
        os.replace(path, directory / path.name)


def rewritten(directory: Path) -> None:
    """All files written to in place, without another size."""
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        with open(path, "r+b") as file:
            file.seek(len(data) // 2)
            file.write(bytes(len(data) - len(data) // 2))


def cut(directory: Path) -> None:
    """All files cut in place."""
    for path in directory.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("is_used", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("lazy", LAZY)
def test_replaced_files_are_not_seen(lazy: str, is_used: bool, own: Path, tmp_path: Path) -> None:
    """Neither by a forward nor by a save, whether or not the model has looked into its files before."""
    expected = logits(load(released(), lazy))
    source = read_directory(released())
    model = load(own, lazy)
    if is_used:
        logits(model)
    replaced(own)
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    if lazy != "dense on disk":
        model.save_pretrained(tmp_path / "saved")
        assert read_directory(tmp_path / "saved").items() <= source.items()
    assert not torch.equal(logits(load(own, lazy)), expected)


@pytest.mark.parametrize("do", [rewritten, cut])
@pytest.mark.parametrize("lazy", LAZY)
def test_changes_in_place_are_refused(lazy: str, do: Callable[[Path], None], own: Path, tmp_path: Path) -> None:
    model = load(own, lazy)
    logits(model)
    do(own)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\.safetensors was changed after"):
            logits(model)
    with pytest.raises(ValueError, match=r"\.safetensors was changed after"):
        model.save_pretrained(tmp_path / "saved")


def test_files_that_were_never_opened(own: Path) -> None:
    """Vision tensors and deeper layers may be asked for long after the index was read."""
    checkpoint = Checkpoint.from_directory(own)
    replaced(own)
    with pytest.raises(ValueError, match=r"\.safetensors was changed after"):
        checkpoint.locate([name for name in checkpoint.where if name.startswith("vision")])


def test_pickles_know_their_files(own: Path) -> None:
    """Unpickled, a model looks into the files it was pickled with, or says that they are not there any more."""
    model = load(own, "mapped")
    blob, expected = pickle.dumps(model), logits(model)
    assert torch.equal(logits(pickle.loads(blob)), expected)
    replaced(own)
    with pytest.raises(ValueError, match=r"\.safetensors was changed after"):
        logits(pickle.loads(blob))


@pytest.mark.parametrize("lazy", LAZY)
def test_forked_processes_read_on_their_own(lazy: str, own: Path) -> None:
    """Readers of one descriptor share no position in the file."""
    model = load(own, lazy)
    expected = logits(model)
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                is_equal = all(torch.equal(logits(model), expected) for _ in range(3))
            finally:
                os._exit(0 if is_equal else 1)
        children.append(child)
    assert all(torch.equal(logits(model), expected) for _ in range(3))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


def test_descriptors_are_given_back(own: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    model = load(own, "mapped")
    logits(model)
    held = len(os.listdir("/proc/self/fd"))
    assert held > before
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
