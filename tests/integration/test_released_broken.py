"""Broken checkpoints: every one is an error that names the tensor or the file, before any forward runs."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_k3 import K3ForCausalLM
from tests.checkpoints import (
    INDEX,
    Raw,
    change,
    copy_of,
    edit_index,
    read_file,
    released,
    write_file,
    zeros,
)

EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w1"
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return copy_of(tmp_path / "checkpoint")


@pytest.mark.parametrize("storage", ["packed", "mapped", "dense"])
@pytest.mark.parametrize("ending", ["weight_scale", "weight_packed"])
def test_a_missing_expert_tensor(ending: str, storage: str, broken: Path) -> None:
    lost = f"{EXPERT}.{ending}"
    edit_index(broken, lambda weight_map: weight_map.pop(lost))
    with pytest.raises(ValueError, match=r"experts\.3\.w1"):
        K3ForCausalLM.from_pretrained(broken, expert_storage=storage)
    change(broken, lambda name, raw: {} if name == lost else {name: raw})
    for strict in (True, False):
        with pytest.raises(ValueError, match=rf"1 missing.*experts\.3\.w1\.{ending}"):
            K3ForCausalLM.from_pretrained(broken, expert_storage=storage, strict=strict)


def test_a_file_without_a_tensor_of_the_index(broken: Path) -> None:
    lost = f"{EXPERT}.weight_scale"
    file = broken / json.loads((broken / INDEX).read_text())["weight_map"][lost]
    write_file(file, {name: raw for name, raw in read_file(file).items() if name != lost})
    with pytest.raises(ValueError, match=r" 1 missing: \S*experts\.3\.w1\.weight_scale\."):
        K3ForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize("is_listed", [False, True])
def test_every_missing_tensor_is_named_once(is_listed: bool, broken: Path) -> None:
    for name in ("lm_head.weight", "model.norm.weight"):
        lost = f"language_model.{name}"
        weight_map = json.loads((broken / INDEX).read_text())["weight_map"]
        change(broken, lambda found, raw, lost=lost: {} if found == lost else {found: raw})
        if is_listed:
            edit_index(broken, lambda each, lost=lost, file=weight_map[lost]: each.update({lost: file}))
    with pytest.raises(ValueError, match=r" 2 missing: lm_head\.weight, model\.norm\.weight\."):
        K3ForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize("storage", ["packed", "mapped", "dense"])
def test_wrong_number_formats_are_named(storage: str, broken: Path) -> None:
    name = f"{EXPERT}.weight_scale"
    change(broken, lambda found, raw: {found: zeros("I8", *raw.shape) if found == name else raw})
    with pytest.raises(ValueError, match=r"experts\.3\.w1\.weight_scale stored as I8 instead of U8"):
        K3ForCausalLM.from_pretrained(broken, expert_storage=storage)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda name: name.replace("weight_packed", "packed"), r"missing.*unknown.*experts\.0\.w1\.packed"),
        (lambda name: name.replace("q_a_proj", "q_proj"), r"missing.*q_a_proj.*unknown.*q_proj"),
        (lambda name: name.replace("experts.7.", "experts.8."), r"missing.*experts\.7.*unknown.*experts\.8"),
        (lambda name: name.replace("layers.1.mlp_res_norm", "layers.1.extra"), r"unknown.*layers\.1\.extra"),
        (lambda name: name.replace(".shared_experts.", ".experts.0."), r"missing.*shared_experts"),
    ],
)
def test_renamed_tensors(rule: Any, message: str, broken: Path) -> None:
    change(broken, lambda name, raw: {rule(name): raw})
    with pytest.raises(ValueError, match=message):
        K3ForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize(
    ("name", "new"),
    [
        (f"{EXPERT}.weight_scale", zeros("U8", 32, 2)),
        (f"{EXPERT}.weight_packed", zeros("U8", 32, 32)),
        (f"{EXPERT}.weight_packed", zeros("BF16", 32, 16)),
        ("language_model.model.norm.weight", zeros("BF16", 65)),
        ("language_model.lm_head.weight", zeros("BF16", 255, 64)),
        ("language_model.model.layers.0.self_attn.A_log", zeros("F32", 3)),
    ],
)
def test_wrong_shapes(name: str, new: Raw, broken: Path) -> None:
    change(broken, lambda found, raw: {found: new if found == name else raw})
    with pytest.raises(ValueError, match=r"of another shape.*" + re.escape(name.removeprefix("language_model.")[-20:])):
        K3ForCausalLM.from_pretrained(broken)


def test_integers_are_no_weights(broken: Path) -> None:
    name = "language_model.model.norm.weight"
    change(broken, lambda found, raw: {found: zeros("U8", 64) if found == name else raw})
    with pytest.raises(ValueError, match=r"norm\.weight is stored as U8"):
        K3ForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize("format", ["F8_E4M3", "F8_E5M2"])
def test_eight_bits_without_a_scale_are_no_weights(format: str, broken: Path, tmp_path: Path) -> None:
    K3ForCausalLM.from_pretrained(broken, dequantize=True).save_pretrained(tmp_path / "plain")
    for end in ("model.layers.0.self_attn.o_proj.weight", f"{EXPERT}.weight".removeprefix("language_model.")):
        folder = Path(shutil.copytree(tmp_path / "plain", tmp_path / end))
        change(folder, lambda found, raw, end=end: {found: zeros(format, *raw.shape) if found.endswith(end) else raw})
        for strict in (True, False):
            with pytest.raises(ValueError, match=rf"{end.removeprefix('model.')} is stored as {format}.* its scale"):
                K3ForCausalLM.from_pretrained(folder, strict=strict)


@pytest.mark.parametrize("cut", [1, 1000, 200_000])
def test_truncated_files(cut: int, broken: Path) -> None:
    file = sorted(broken.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=rf"{file.name} is truncated"):
        K3ForCausalLM.from_pretrained(broken)


def test_a_missing_file(broken: Path) -> None:
    file = sorted(broken.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(OSError, match=file.name):
        K3ForCausalLM.from_pretrained(broken)


def test_a_tail_that_is_not_zero(broken: Path) -> None:
    name = "language_model.model.layers.4.self_attn.A_log"

    def spoil(found: str, raw: Raw) -> dict[str, Raw]:
        return {found: raw._replace(data=raw.data[:-4] + b"\0\0\x80\x3f") if found == name else raw}

    change(broken, spoil)
    with pytest.raises(ValueError, match=r"layers\.4\.self_attn\.A_log has 16 entries for 4 heads"):
        K3ForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/passwd", "model-00001-of-000003.bin", "", 7, "a/../../b.safetensors"]
)
def test_index_paths_stay_inside(file: Any, broken: Path) -> None:
    edit_index(broken, lambda weight_map: weight_map.update({f"{EXPERT}.weight_scale": file}))
    with pytest.raises(ValueError, match=r"allowed are \.safetensors files inside"):
        K3ForCausalLM.from_pretrained(broken)


def test_only_safetensors(broken: Path) -> None:
    for path in [*broken.glob("*.safetensors"), broken / INDEX]:
        path.unlink()
    (broken / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="safetensors files only"):
        K3ForCausalLM.from_pretrained(broken)
    with pytest.raises(ValueError, match="use_safetensors=False"):
        K3ForCausalLM.from_pretrained(released(), use_safetensors=False)


def test_one_tensor_under_two_names(broken: Path) -> None:
    name = "language_model.model.norm.weight"
    change(broken, lambda found, raw: {found: raw, "model.norm.weight": raw} if found == name else {found: raw})
    with pytest.raises(ValueError, match="are the same parameter"):
        K3ForCausalLM.from_pretrained(broken)
