"""Mapped experts under a budget: the numbers stay the same bit for bit, and the budget holds as the caches grow."""

import copy
import ctypes
import gc
import mmap
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import K3Cache, K3Config, K3ForCausalLM
from modeling_k3.conversion.tiny import make_tiny
from modeling_k3.experts import iter_experts
from modeling_k3.planning import plan_memory
from tests.models import experts_config

EXPERTS, WIDTH, LAYERS = 32, 256, 4
ONE = 3 * WIDTH * WIDTH * 17 // 32
IDS = torch.randint(0, 512, (1, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = experts_config(EXPERTS, WIDTH, LAYERS, num_experts_per_token=4)
    return make_tiny(tmp_path_factory.mktemp("residency") / "checkpoint", config, tokens=0)


def load(checkpoint: Path, **options: Any) -> K3ForCausalLM:
    return K3ForCausalLM.from_pretrained(checkpoint, **options).eval()


@torch.no_grad()
def run(model: K3ForCausalLM) -> list[Tensor]:
    """Logits of a prefill, in one piece and in pieces, and what comes after it."""
    cache = K3Cache(model.config)
    found = [model(IDS).logits, model(IDS[:, :20], cache=cache).logits]
    found += [model(IDS[:, i : i + 1], cache=cache).logits for i in range(20, 24)]
    return [*found, model.generate(IDS, max_new_tokens=6, do_sample=False)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Tensor]:
    return run(load(checkpoint, expert_storage="packed"))


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def pages_in_memory(model: K3ForCausalLM) -> int:
    """Bytes of whole pages of mapped experts in the page cache."""
    libc, total = ctypes.CDLL(None, use_errno=True), 0
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    for _, module in iter_experts(model):
        for expert in range(module.num_experts):
            for file, spans in module.pages._ranges([expert]).items():
                for start, stop in spans:
                    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
                    seen = (ctypes.c_ubyte * ((last - first) // mmap.PAGESIZE))()
                    address = file.bytes_at(first, last).data_ptr()
                    assert libc.mincore(address, last - first, seen) == 0
                    total += sum(byte & 1 for byte in seen) * mmap.PAGESIZE
    return total


def empty(model: K3ForCausalLM) -> int:
    """Take all experts out of memory, whoever brought them in; returns what stays: neighbours of mapped tensors."""
    files = {file for _, module in iter_experts(model) for file in module.pages.files}
    for file in files:
        os.fsync(file._handle)
        file.drop([(0, file.path.stat().st_size)])
        os.posix_fadvise(file._handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return pages_in_memory(model)


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that nobody else looks at or needs."""
    return Path(shutil.copytree(checkpoint, tmp_path / "own"))


can_look = pytest.mark.skipif(
    not (hasattr(os, "posix_fadvise") and Path("/proc/self/status").exists()), reason="needs Linux's page cache"
)


@pytest.mark.parametrize("experts", [2, 5, 24, 200])
def test_same_numbers_and_within_the_budget(experts: int, checkpoint: Path, expected: list[Tensor]) -> None:
    model = load(checkpoint, expert_memory=experts * ONE + (2 << 20))
    assert_same(run(model), expected)
    stats = model.expert_residency.stats()
    assert stats["peak_bytes"] <= model.expert_residency.budget
    assert stats["misses"] > 0 and stats["bytes_read"] >= stats["misses"] * ONE
    assert (stats["evictions"] > 0) == (experts < 100)
    assert stats["hits"] > 0 and stats["seconds_stalled"] > 0
    assert stats["guesses"] > 0 or experts < 24


@can_look
def test_what_is_counted_is_what_is_in_memory(own: Path) -> None:
    model = load(own, expert_memory=8 * ONE)
    residency = model.expert_residency
    run(model)
    residency.forget()
    assert residency.resident_bytes == 0
    # Dense tensors are mapped with whatever the system read around them.
    around = empty(model)
    for ids in IDS.view(6, 1, 4):
        with torch.no_grad():
            model(ids, use_cache=False)
        assert pages_in_memory(model) - around <= residency.budget
    assert pages_in_memory(model) - around > residency.budget // 2


MAPS = {
    "cpu": {"": "cpu"},
    "disk": {"": "disk"},
    "mixed": {"": "cpu", "model.layers.1": "disk", "model.layers.3": "disk"},
    "experts on disk": {"": "cpu", **{f"model.layers.{i}.block_sparse_moe.experts": "disk" for i in range(1, LAYERS)}},
}


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_device_maps(device_map: dict[str, str], checkpoint: Path, expected: list[Tensor]) -> None:
    model = load(checkpoint, device_map=device_map, expert_memory=8 * ONE)
    assert_same(run(model), expected)
    assert model.expert_residency.stats()["peak_bytes"] <= 8 * ONE


@can_look
def test_a_longer_context_takes_its_bytes_from_the_experts(own: Path) -> None:
    model = load(own, expert_memory=40 * ONE)
    residency, cache = model.expert_residency, K3Cache(model.config)
    around, room = 0, []
    for ids in torch.randint(0, 512, (12, 1, 400), generator=torch.Generator().manual_seed(2)):
        with torch.no_grad():
            model(ids, cache=cache, logits_to_keep=1)
            model(ids[:, :1], cache=cache)
        held = cache.nbytes()["total"]
        if not room:
            residency.forget()
            around = empty(model)
        # What the last layers' latents grew by is counted at the next call.
        assert residency.resident_bytes + residency.stats()["cache_bytes"] <= residency.budget
        assert residency.resident_bytes + held <= residency.budget + held // max(cache.get_seq_length() // 401, 1)
        assert pages_in_memory(model) - around + held <= residency.budget
        room.append(residency.limit)
    assert room == sorted(room, reverse=True) and room[-1] < room[0] - 2 * ONE
    del cache
    gc.collect()
    model(IDS, use_cache=False)
    assert residency.limit == residency.budget


def test_training_through_mapped_experts(checkpoint: Path) -> None:
    gradients = []
    for options in ({"expert_storage": "packed"}, {"expert_memory": 3 * ONE}):
        model = load(checkpoint, **options)
        model(IDS, labels=IDS).loss.backward()
        gradients.append(model.model.embed_tokens.weight.grad)
    assert torch.equal(*gradients)


def test_a_changed_file_is_an_error(own: Path) -> None:
    model = load(own, expert_memory=3 * ONE)
    path = next(own.glob("*.safetensors"))
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="was changed after it was first looked at"), torch.no_grad():
        model(IDS)


def test_a_file_cut_while_a_layer_reads_is_an_error(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(own, expert_memory=3 * ONE)
    path, pages = next(own.glob("*.safetensors")), next(iter(iter_experts(model)))[1].pages
    first = pages.load

    def cut(expert: int) -> None:
        os.truncate(path, path.stat().st_size // 2)
        first(expert)

    monkeypatch.setattr(pages, "load", cut)
    with pytest.raises(ValueError, match=r"changed|truncated"), torch.no_grad():
        model(IDS)


def test_options(checkpoint: Path) -> None:
    for options, message in (
        ({"expert_memory": "much"}, "expert_memory='much' is no size"),
        ({"expert_memory": ONE}, "two experts"),
        ({"expert_memory": "1GiB", "expert_storage": "packed"}, "allowed is 'mapped'"),
    ):
        with pytest.raises(ValueError, match=message):
            load(checkpoint, **options)
    model = load(checkpoint, expert_storage="packed")
    assert model.expert_residency is None
    with pytest.raises(ValueError, match="no experts are mapped"):
        model.limit_expert_memory("1GiB")


def test_too_little_memory_is_said_before_anything_is_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*args: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("modeling_k3.persistence.fill", fill)
    with pytest.raises(ValueError, match=rf"expert_memory={2 * ONE - 1} bytes; allowed are {2 * ONE}, "):
        load(checkpoint, expert_memory=2 * ONE - 1)
    stacks = EXPERTS * (LAYERS - 1) * ONE
    for options, needed in (({"expert_storage": "packed"}, stacks), ({"dequantize": True}, stacks * 64 // 17)):
        monkeypatch.setattr("modeling_k3.placement.available_memory", lambda needed=needed: needed - 1)
        with pytest.raises(ValueError, match=r"takes 0\.0\d GB for routed experts, .* allowed is 'mapped'"):
            load(checkpoint, **options)
        monkeypatch.setattr("modeling_k3.placement.available_memory", lambda needed=needed: needed)
        with pytest.raises(AssertionError):
            load(checkpoint, **options)


def test_limits_change_and_end(checkpoint: Path, expected: list[Tensor]) -> None:
    model = load(checkpoint, expert_storage="mapped")
    for budget in ("1MiB", 4 * ONE, None):
        model.limit_expert_memory(budget)
        assert (model.expert_residency is None) == (budget is None)
        assert model.model.expert_residency is model.expert_residency
        assert_same(run(model), expected)


def test_a_copy_shares_and_the_thread_ends(checkpoint: Path, expected: list[Tensor]) -> None:
    before = threading.active_count()
    model = load(checkpoint, expert_memory=8 * ONE)
    other = copy.deepcopy(model)
    assert other.expert_residency is model.expert_residency
    assert_same(run(model), expected)
    assert_same(run(other), expected)
    thread = next(iter(model.expert_residency._pool._threads))
    del model, other
    gc.collect()
    thread.join(5)
    assert not thread.is_alive() and threading.active_count() <= before


def test_a_plan_hands_over_one_budget(checkpoint: Path, expected: list[Tensor]) -> None:
    """What the experts may hold at any length is what the plan says, to the byte."""
    config = K3Config.from_pretrained(checkpoint)
    room = plan_memory(config, "64GiB", context=512, prefill_chunk=64)
    least = room.used - room.expert_total + 12 * ONE
    plan = plan_memory(config, least, context=512, prefill_chunk=64)
    assert plan.expert_place == "mapped"
    model = load(checkpoint, **plan.load_options())
    assert_same(run(model), expected)
    cache = K3Cache(model.config)
    for tokens in (64, 128, 512):
        with torch.no_grad():
            model(torch.zeros(1, tokens - cache.get_seq_length(), dtype=torch.long), cache=cache, logits_to_keep=1)
        stats = model.expert_residency.stats()
        # Room that the cache took for latents to come is not the experts' any more.
        early = cache.nbytes()["reserved"]
        assert stats["limit_bytes"] + early == plan.expert_bytes_at(tokens) and stats["peak_bytes"] > 0
        assert stats["resident_bytes"] + stats["cache_bytes"] <= plan.load_options()["expert_memory"]
