"""Saving what was loaded from the released layout: the same bytes, in one atomic step."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from modeling_k3 import K3ForCausalLM, saving
from tests.checkpoints import (
    MIXED,
    Raw,
    change,
    copy_of,
    read_directory,
    released,
    text_of,
    zeros,
)

CASES = ("mxfp4_release", "mxfp4_release_wide")
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w1"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """Logits of the packed model, everything resident, in the stored number format."""
    return logits(K3ForCausalLM.from_pretrained(released()))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return copy_of(tmp_path / "checkpoint")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expert_storage": "mapped"},
        {"device_map": {"": "disk"}},
        {"device_map": MIXED, "expert_storage": "packed"},
    ],
    ids=["packed", "mapped", "disk", "mixed"],
)
def test_saved_again_it_is_the_same(case: str, options: dict, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(released(case), **options)
    source = read_directory(released(case))
    model.save_pretrained(tmp_path / "text", max_shard_size="150KB")
    assert read_directory(tmp_path / "text") == text_of(source)
    assert len(list((tmp_path / "text").glob("model-*-of-*.safetensors"))) > 3
    model.save_pretrained(tmp_path / "all", vision=True)
    assert read_directory(tmp_path / "all") == source
    config = json.loads((tmp_path / "all" / "config.json").read_text())
    original = json.loads((released(case) / "config.json").read_text())
    assert config["model_type"] == "kimi_k3"
    for key in ("quantization_config", "linear_attn_config", "model_type", "architectures", "dtype"):
        assert config["text_config"][key] == original["text_config"][key]
    assert config["vision_config"] == original["vision_config"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "text")), logits(model))


def test_saving_onto_itself(broken: Path, expected: Tensor) -> None:
    """The model looks into the files that are replaced."""
    source = read_directory(broken)
    model = K3ForCausalLM.from_pretrained(broken, expert_storage="mapped")
    model.save_pretrained(broken, max_shard_size="100KB", vision=True)
    assert read_directory(broken) == source
    model.save_pretrained(broken, vision=True)
    assert read_directory(broken) == source
    assert sorted(path.name for path in broken.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("options", [{}, {"num_hidden_layers": 3}], ids=["vision", "layers"])
def test_a_part_never_takes_the_place_of_the_whole(broken: Path, options: dict[str, int]) -> None:
    source = read_directory(broken)
    model = K3ForCausalLM.from_pretrained(broken, **options)
    with pytest.raises(ValueError, match="would be lost"):
        model.save_pretrained(broken, vision=bool(options))
    assert read_directory(broken) == source


def test_a_commit_cut_short_leaves_no_new_config_beside_old_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    K3ForCausalLM.from_pretrained(released()).save_pretrained(target)
    smaller = K3ForCausalLM.from_pretrained(released(), num_hidden_layers=4)

    def cut(self: saving.Staging, name: str) -> None:
        if name.endswith(".safetensors"):
            raise KeyboardInterrupt
        os.replace(self.path / name, self.target / name)

    monkeypatch.setattr(saving.Staging, "_replace", cut)
    with pytest.raises(KeyboardInterrupt):
        smaller.save_pretrained(target)
    with pytest.raises(OSError, match="has neither"):
        K3ForCausalLM.from_pretrained(target)


@pytest.mark.parametrize("odd", ["language_model.model.norm.weight", f"{EXPERT}.weight_scale"])
@pytest.mark.parametrize("prefix", ["", "model.", "language_model."])
def test_odd_names_stay_odd(odd: str, prefix: str, broken: Path, tmp_path: Path, expected: Tensor) -> None:
    """A tensor with another prefix than the rest keeps it, and does not pass it on."""
    other = prefix + odd.removeprefix("language_model.model.")
    change(broken, lambda name, raw: {other if name == odd else name: raw})
    model = K3ForCausalLM.from_pretrained(broken)
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "saved", vision=True)
    assert read_directory(tmp_path / "saved") == read_directory(broken)
    model.config.released_config = None
    model.save_pretrained(tmp_path / "flat")
    plain = {name.removeprefix("language_model.") for name in text_of(read_directory(released()))}
    assert read_directory(tmp_path / "flat").keys() == plain


#: Tensors that the miniature has in bfloat16 or float32, and the format they are given.
OTHERS = {"model.norm.weight": "F32", "layers.2.self_attn.o_proj.weight": "F16", "layers.4.self_attn.A_log": "BF16"}


def recast(name: str, raw: Raw) -> dict[str, Raw]:
    """Some tensors in a number format that the model has not, with values that it cannot hold."""
    found = [dtype for ending, dtype in OTHERS.items() if name.endswith(ending)]
    if not found:
        return {name: raw}
    values = torch.frombuffer(bytearray(raw.data), dtype=DTYPES[raw.dtype]).float() * 1.0001
    return {name: Raw(found[0], raw.shape, values.to(DTYPES[found[0]]).view(torch.uint8).numpy().tobytes())}


@pytest.mark.parametrize("options", [{}, {"device_map": {"": "disk"}}], ids=["resident", "disk"])
def test_number_formats_go_back_as_they_are_stored(
    options: dict, broken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(broken, recast)
    source, before = read_directory(broken), read_directory(released())
    assert sum(raw.dtype != before[name].dtype for name, raw in source.items()) == 3
    model = K3ForCausalLM.from_pretrained(broken, **options)
    model.save_pretrained(tmp_path / "saved", vision=True)
    assert read_directory(tmp_path / "saved") == source
    assert "another number format" not in caplog.text


def test_number_formats_of_the_user(broken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A changed tensor, and a model whose dtype was chosen, go out as they are, with one line about it."""
    change(broken, recast)
    model = K3ForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(tmp_path / "changed")
    saved, source = read_directory(tmp_path / "changed"), text_of(read_directory(broken))
    assert {name for name in source if saved[name] != source[name]} == {"language_model.model.norm.weight"}
    assert saved["language_model.model.norm.weight"].dtype == "BF16"
    model = K3ForCausalLM.from_pretrained(broken, dtype=torch.float32)
    model.save_pretrained(tmp_path / "wide")
    assert {raw.dtype for raw in read_directory(tmp_path / "wide").values()} == {"F32", "U8"}
    lines = [record.getMessage() for record in caplog.records if "another number format" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith("1 tensors are saved")


def test_dense_experts_in_another_format(broken: Path, tmp_path: Path) -> None:
    model = K3ForCausalLM.from_pretrained(broken, dequantize=True)
    model.save_pretrained(tmp_path / "dense")
    change(
        tmp_path / "dense",
        lambda name, raw: {
            name: raw if "experts.3.w" not in name else zeros("F16", *raw.shape)._replace(data=raw.data)
        },
    )
    for options in ({}, {"device_map": {"": "disk"}, "expert_storage": "dense"}):
        again = K3ForCausalLM.from_pretrained(tmp_path / "dense", **options)
        again.save_pretrained(tmp_path / "again")
        assert read_directory(tmp_path / "again") == read_directory(tmp_path / "dense")


def test_dequantized_it_is_saved_as_bf16(tmp_path: Path) -> None:
    model = K3ForCausalLM.from_pretrained(released(), dequantize=True, experts_implementation="eager")
    model.save_pretrained(tmp_path)
    saved = read_directory(tmp_path)
    assert saved[f"{EXPERT}.weight"].dtype == "BF16"
    assert saved.keys() == {re.sub(r"_packed|_scale", "", name) for name in text_of(read_directory(released()))}
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    again = K3ForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert torch.equal(logits(again), logits(model))
    mapped = K3ForCausalLM.from_pretrained(tmp_path, expert_storage="mapped")
    assert torch.equal(logits(mapped), logits(model))


def test_flat_on_request(tmp_path: Path, expected: Tensor) -> None:
    model = K3ForCausalLM.from_pretrained(released())
    model.config.released_config = None
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "k3"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert all(not name.startswith("language_model.") for name in read_directory(tmp_path))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_a_failed_save_leaves_the_old_checkpoint(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in broken.iterdir()}
    model = K3ForCausalLM.from_pretrained(broken)

    def fail(handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("modeling_k3.tensor_writer.os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(broken, vision=True)
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == before


def test_vision_that_is_not_there(tmp_path: Path) -> None:
    K3ForCausalLM.from_pretrained(released()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no vision tensors"):
        K3ForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "all", vision=True)
    with pytest.raises(ValueError, match=r"max_shard_size='many'"):
        K3ForCausalLM.from_pretrained(released()).save_pretrained(tmp_path, max_shard_size="many")
