"""A PrefixCache on disk: saved whole or not at all, and refused where it is damaged or belongs to another model."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from modeling_k3 import PrefixCache, prefix_files
from tests.models import build, tiny_config, token_ids

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module", params=["KMK", "KK", "MM"])
def model(request: pytest.FixtureRequest) -> Any:
    return build(tiny_config(request.param, eos_token_id=None)).requires_grad_(False)


@pytest.fixture
def hybrid() -> Any:
    return build(tiny_config("KMK", eos_token_id=None)).requires_grad_(False)


def test_saved_and_loaded(model: Any, tmp_path: Path) -> None:
    prompts = [torch.cat([token_ids(1, 8), token_ids(1, 9, seed=seed)], 1) for seed in (1, 2)]
    prefixes, path = PrefixCache(block_size=4), tmp_path / "prefix.safetensors"
    expected = [model.generate(prompt, prefix_cache=prefixes, **GREEDY) for prompt in prompts]
    prefixes.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["prefix.safetensors"]
    for options in ({}, {"device": "cpu"}):
        loaded = PrefixCache.load(path, model, **options)
        assert list(loaded._blocks) == list(prefixes._blocks) and loaded.block_size == 4
        assert loaded.stats()["bytes"] == prefixes.stats()["bytes"]
        outputs = [model.generate(prompt, prefix_cache=loaded, **GREEDY) for prompt in prompts]
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        assert loaded.stats()["hit_tokens"] == 32 and loaded.stats()["misses"] == 0
    each = prefixes.stats()["bytes"] / len(prefixes)
    small = PrefixCache.load(path, model, max_bytes=int(2.5 * each))
    assert len(small) == 2 and all(not b.parent or b.parent in small._blocks for b in small._blocks.values())


def test_files_of_another_model_and_other_files_are_refused(hybrid: Any, tmp_path: Path) -> None:
    prefixes, path = PrefixCache(block_size=4), tmp_path / "prefix.safetensors"
    with pytest.raises(ValueError, match="empty"):
        prefixes.save(path)
    hybrid.generate(token_ids(1, 9), prefix_cache=prefixes, **GREEDY)
    prefixes.save(path)
    with pytest.raises(ValueError, match="another model"):
        PrefixCache.load(path, build(tiny_config("KMK"), seed=1))
    tensors = load_file(path)
    save_file(tensors, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="not a prefix cache"):
        PrefixCache.load(tmp_path / "plain.safetensors", hybrid)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of the hybrid."""
    model, prefixes = build(tiny_config("KMK", eos_token_id=None)), PrefixCache(block_size=4)
    model.generate(token_ids(1, 9), prefix_cache=prefixes, **GREEDY)
    prefixes.save(tmp_path_factory.mktemp("stored") / "prefix.safetensors")
    return tmp_path_factory.getbasetemp() / "stored0" / "prefix.safetensors"


def header(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["k3_prefix_cache"])


@pytest.mark.parametrize(
    "name", ["0.tokens", "1.tokens", "0.latents.0.0", "1.latents.0.1", "0.states.0.2", "1.states.1.0"]
)
def test_every_lost_or_cut_tensor_is_named(name: str, stored: Path, hybrid: Any, tmp_path: Path) -> None:
    tensors, metadata = load_file(stored), {"k3_prefix_cache": json.dumps(header(stored))}
    path = tmp_path / "damaged.safetensors"
    for change, message in (
        (lambda x: x.pop(name), "is missing"),
        (lambda x: x.update({name: x[name][..., :-1].contiguous()}), "has shape"),
        (lambda x: x.update({f"{name}.0": x[name].clone()}), "should not be there"),
    ):
        damaged = dict(tensors)
        change(damaged)
        save_file(damaged, path, metadata=metadata)
        with pytest.raises(ValueError, match=rf"damaged.safetensors is damaged: tensor {name}.*{message}"):
            PrefixCache.load(path, hybrid)


@pytest.mark.parametrize(
    "change",
    [
        {"parents": [0, -1]},
        {"parents": [5, -1]},
        {"parents": None},
        {"shapes": {}},
        {"block_size": 8},
        {"block_size": []},
    ],
    ids=str,
)
def test_headers_that_make_no_sense_are_refused(
    change: dict[str, Any], stored: Path, hybrid: Any, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.safetensors"
    save_file(load_file(stored), path, metadata={"k3_prefix_cache": json.dumps({**header(stored), **change})})
    with pytest.raises(ValueError, match="damaged"):
        PrefixCache.load(path, hybrid)


def test_a_cut_file_is_refused(stored: Path, hybrid: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    for size in (0, 5, 100, stored.stat().st_size - 1):
        path.write_bytes(stored.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"cut\.safetensors is damaged"):
            PrefixCache.load(path, hybrid)


def test_threads_save_to_one_path(stored: Path, hybrid: Any, tmp_path: Path) -> None:
    prefixes, path, failures = PrefixCache.load(stored, hybrid), tmp_path / "prefix.safetensors", []

    def work() -> None:
        try:
            for _ in range(10):
                prefixes.save(path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and [file.name for file in tmp_path.iterdir()] == ["prefix.safetensors"]
    assert len(PrefixCache.load(path, hybrid)) == 2


def test_a_failed_save_leaves_the_old_file(
    stored: Path, hybrid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes, path = PrefixCache.load(stored, hybrid), tmp_path / "prefix.safetensors"
    path.write_bytes(b"old")

    def full(file: int) -> None:
        raise OSError("no space left, as if")

    monkeypatch.setattr(prefix_files.os, "fsync", full)
    with pytest.raises(OSError, match="as if"):
        prefixes.save(path)
    assert path.read_bytes() == b"old" and [file.name for file in tmp_path.iterdir()] == ["prefix.safetensors"]
