"""Fingerprints: which changes of a model a prefix cache notices, and at what cost."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_k3 import K3ForCausalLM, PrefixCache, prefix_cache
from modeling_k3 import fingerprint as fingerprint_module
from modeling_k3.conversion.tiny import make_tiny
from modeling_k3.fingerprint import fingerprint, weights_version
from modeling_k3.tensor_files import TensorFile
from tests.models import build, tiny_config, token_ids

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def hybrid() -> Any:
    return build(tiny_config("KMK", eos_token_id=None)).requires_grad_(False)


def test_another_model_or_changed_weights_are_refused(hybrid: Any) -> None:
    prompt, prefixes = token_ids(1, 9), PrefixCache(block_size=4)
    hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
    other = build(tiny_config("KMK", eos_token_id=None), seed=1).requires_grad_(False)
    with pytest.raises(ValueError, match="another model"):
        other.generate(prompt, prefix_cache=prefixes, **GREEDY)
    twin = build(tiny_config("KMK", eos_token_id=None)).requires_grad_(False)
    twin.generate(prompt, prefix_cache=prefixes, **GREEDY)
    assert prefixes.stats()["hits"] == 1
    with torch.no_grad():
        hybrid.model.layers[2].block_sparse_moe.experts.down_proj[3, 5, 7] += 1e-3
    with pytest.raises(ValueError, match="weights have changed"):
        hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
    prefixes.clear()
    hybrid.generate(prompt, prefix_cache=prefixes, **GREEDY)
    assert len(prefixes) == 2


def test_fingerprints_see_single_changes(hybrid: Any) -> None:
    first = fingerprint(hybrid)
    assert first == fingerprint(hybrid) == fingerprint(build(tiny_config("KMK", eos_token_id=None)))
    assert first != fingerprint(build(tiny_config("KMK", rms_norm_eps=1e-6)))
    weight = hybrid.model.embed_tokens.weight
    with torch.no_grad():
        weight[3], weight[4] = weight[4].clone(), weight[3].clone()
    swapped = fingerprint(hybrid)
    with torch.no_grad():
        weight[3], weight[4] = weight[4].clone(), weight[3].clone()
    assert swapped != first == fingerprint(hybrid)
    assert fingerprint(hybrid.bfloat16()) != first


def write_past_autograd(model: Any) -> None:
    model.lm_head.weight.data.mul_(2.0)


def swap_the_data(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight.data = model.model.layers[0].self_attn.o_proj.weight.data * 1.5


def write_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.model.norm.weight.add_(0.1)


def change_the_config(model: Any) -> None:
    model.config.num_experts_per_token = 1


def replace_a_weight(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight + 1e-3)


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(
    "change",
    [write_past_autograd, swap_the_data, write_in_inference_mode, change_the_config, replace_a_weight],
    ids=lambda f: f.__name__,
)
def test_every_kind_of_change_is_seen_by_the_next_call(change: Callable[[Any], None], is_inference: bool) -> None:
    if is_inference and change is swap_the_data:
        pytest.skip("torch cannot even look at such a tensor")
    with torch.inference_mode(is_inference):
        model = build(tiny_config("KMK", eos_token_id=None)).requires_grad_(False)
    prefixes = PrefixCache(block_size=4)
    prefixes.bind(model)
    prefixes.bind(model)
    change(model)
    with pytest.raises(ValueError, match="weights have changed"):
        prefixes.bind(model)


def test_looking_again_does_not_read_everything(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, calls = PrefixCache(), []
    monkeypatch.setattr(prefix_cache, "fingerprint", lambda model: calls.append(1) or "same")
    for _ in range(3):
        prefixes.bind(hybrid)
    assert len(calls) == 1


def test_layouts_of_any_kind_are_read(hybrid: Any) -> None:
    """Odd sizes and offsets, transposed, empty: each has a checksum, and each change shows in both."""
    raw = torch.arange(101, dtype=torch.uint8)
    for name, x in {
        "odd": raw[3:100],
        "scalar": raw[7],
        "transposed": raw[:64].view(8, 8).t(),
        "bf16": torch.arange(35.0).bfloat16()[1:],
        "fp8": torch.arange(35.0).to(torch.float8_e4m3fn)[3:],
        "empty": raw[:0],
    }.items():
        hybrid.register_buffer("odd", x)
        before = weights_version(hybrid), fingerprint(hybrid)
        if x.numel():
            first = x.view(torch.uint8) if x.ndim == 0 else x[:1].view(torch.uint8)
            first.data += 1
            assert weights_version(hybrid) != before[0] and fingerprint(hybrid) != before[1], name


# -- experts in files, weights elsewhere --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the hybrid, with experts in MXFP4."""
    path = tmp_path_factory.mktemp("checkpoint")
    return make_tiny(path / "checkpoint", tiny_config("KMK", eos_token_id=None), tokens=0)


def load(path: Path, **options: Any) -> Any:
    return K3ForCausalLM.from_pretrained(path, **options).eval()


@pytest.mark.parametrize("limit", [2**30, 0], ids=["whole", "spots"])
def test_every_mapped_matrix_counts(limit: int, checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A copy elsewhere is the same model; one other byte of any tensor of an expert makes another one."""
    monkeypatch.setattr(fingerprint_module, "_WHOLE_EXPERT_BYTES", limit)
    first = fingerprint(load(checkpoint, expert_storage="mapped"))
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    assert fingerprint(load(copy, expert_storage="mapped")) == first
    file = TensorFile(next(copy.glob("*.safetensors")))
    experts = [entry for name, entry in file.entries.items() if ".experts." in name]
    assert len(experts) == 2 * 8 * 3 * 2
    for entry in experts[::5]:
        # Between the spots only a whole reading sees it.
        at = entry.start if limit == 0 else (entry.start + entry.stop) // 2 + 3
        with open(file.path, "rb+") as raw:
            raw.seek(at)
            old = raw.read(1)
            raw.seek(at)
            raw.write(bytes([old[0] ^ 1]))
        assert fingerprint(load(copy, expert_storage="mapped")) != first
        with open(file.path, "rb+") as raw:
            raw.seek(at)
            raw.write(old)


def test_a_changed_file_under_a_bound_model_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    model, prefixes = load(copy, expert_storage="mapped"), PrefixCache()
    prefixes.bind(model)
    os.utime(next(copy.glob("*.safetensors")), ns=(1, 1))
    with pytest.raises(ValueError, match="was changed"):
        prefixes.bind(model)


def test_weights_on_disk_count(checkpoint: Path, tmp_path: Path) -> None:
    """Weights that hooks bring are read where the hooks find them; those that nobody brings are refused."""
    pytest.importorskip("accelerate")
    other = tmp_path / "other"
    model = load(checkpoint)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[2, 3] += 0.5
    model.save_pretrained(other)
    device_map = {"": "cpu", "model.layers.1": "disk", "lm_head": "disk"}
    marks = [
        fingerprint(load(path, device_map=device_map, offload_folder=str(tmp_path / f"{path.name}-{i}")))
        for path in (checkpoint, other)
        for i in range(2)
    ]
    assert marks[0] == marks[1] != marks[2] == marks[3]
    nowhere = build(tiny_config("KMK", eos_token_id=None))
    nowhere.lm_head = nowhere.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"lm_head.weight is on the meta device.*allowed"):
        PrefixCache().bind(nowhere)
