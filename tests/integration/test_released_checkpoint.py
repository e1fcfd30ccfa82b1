"""What a user does with a directory in the released layout: load it in every way, break it, save it again."""

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from modeling_k3 import K3ForCausalLM, K3Model
from tests.checkpoints import (
    INDEX,
    Raw,
    change,
    copy_of,
    edit_config,
    edit_index,
    read_directory,
    read_file,
    released,
    write_file,
    zeros,
)

CASES = ("mxfp4_release", "mxfp4_release_wide")
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w1"
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


#: Two layers and the head on disk, the rest on the CPU; a valid map names every part.
MIXED = {
    "model.embed_tokens": "cpu",
    **{f"model.layers.{i}": "disk" if i in (1, 3) else "cpu" for i in range(9)},
    "model.output_attn_res_norm": "cpu",
    "model.output_attn_res_proj": "cpu",
    "model.norm": "cpu",
    "lm_head": "disk",
}


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


def text_of(tensors: dict[str, Raw]) -> dict[str, Raw]:
    return {name: raw for name, raw in tensors.items() if name.startswith("language_model.")}


# -- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["packed", "mapped", "dense", None])
def test_every_form_by_every_entrance(storage: str | None, expected: Tensor) -> None:
    options = {"expert_storage": storage, "experts_implementation": "eager", "output_loading_info": True}
    for entrance in (AutoModelForCausalLM, K3ForCausalLM):
        model, info = entrance.from_pretrained(released(), **options)
        assert {key: list(value) for key, value in info.items()} == {key: [] for key in info}
        assert type(model) is K3ForCausalLM
        assert torch.equal(logits(model), expected)
    decoder, info = AutoModel.from_pretrained(released(), **options)
    assert type(decoder) is K3Model
    assert not any(info.values())
    assert torch.equal(model.lm_head(decoder(IDS).last_hidden_state), expected)


def test_dequantize_gives_an_ordinary_bf16_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(released(), dequantize=True)
    experts = model.model.layers[1].block_sparse_moe.experts
    assert experts.storage == "dense"
    assert experts.gate_up_proj.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert not getattr(model, "is_quantized", False)
    model.train()(IDS, labels=IDS).loss.backward()
    assert experts.down_proj.grad is not None
    with pytest.raises(ValueError, match="contradicts"):
        K3ForCausalLM.from_pretrained(released(), dequantize=True, expert_storage="packed")
    with pytest.raises(ValueError, match=r"expert_storage='zip' is unknown"):
        K3ForCausalLM.from_pretrained(released(), expert_storage="zip")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "device_map",
    ["auto", {"": "cpu"}, {"": "disk"}, MIXED],
    ids=["auto", "cpu", "disk", "mixed"],
)
def test_device_maps_on_the_cpu(case: str, device_map: Any) -> None:
    resident = K3ForCausalLM.from_pretrained(released(case))
    mask = torch.ones_like(IDS)
    tokens = resident.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for storage in (None, "mapped"):
        placed = K3ForCausalLM.from_pretrained(released(case), device_map=device_map, expert_storage=storage)
        for _ in range(2):
            assert torch.equal(logits(placed), logits(resident))
        assert torch.equal(placed.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False), tokens)


@pytest.mark.parametrize("storage", ["packed", "mapped", "dense"])
def test_auto_map_with_little_memory(storage: str, expected: Tensor, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        released(),
        device_map="auto",
        max_memory={"cpu": "500KB"},
        expert_storage=storage,
        experts_implementation="eager",
        offload_folder=tmp_path,
    )
    assert {"cpu", "disk"} == set(model.hf_device_map.values())
    assert torch.equal(logits(model), expected)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_mapped(caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(released(), device_map="auto", max_memory={"cpu": "400KB"})
    assert {m.storage for m in model.modules() if hasattr(m, "storage")} == {"mapped"}
    lines = [record.getMessage() for record in caplog.records if "experts are" in record.getMessage()]
    assert len(lines) == 1
    assert "mapped" in lines[0]


def test_one_line_about_vision(caplog: pytest.LogCaptureFixture) -> None:
    AutoModelForCausalLM.from_pretrained(released())
    lines = [record.getMessage() for record in caplog.records if "vision" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("18 vision and projector tensors")


def test_quantisation_block_at_either_level(broken: Path, expected: Tensor) -> None:
    def hoist(config: dict) -> None:
        config["quantization_config"] = config["text_config"].pop("quantization_config")

    edit_config(broken, hoist)
    model = AutoModelForCausalLM.from_pretrained(broken)
    assert torch.equal(logits(model), expected)
    model.save_pretrained(broken)
    config = json.loads((broken / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "quantization_config" not in config["text_config"]


def test_the_index_decides_what_is_packed(broken: Path, expected: Tensor) -> None:
    """Neither patterns that match everything, nor patterns that ignore everything, nor no block at all matter."""
    for ignore in ([], ["re:.*"]):
        edit_config(broken, lambda config, i=ignore: config["text_config"]["quantization_config"].update(ignore=i))
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(broken)), expected)
    edit_config(broken, lambda config: config["text_config"].pop("quantization_config"))
    model = AutoModelForCausalLM.from_pretrained(broken)
    assert torch.equal(logits(model), expected)
    packed = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.uint8}
    assert len(packed) == 4 * 8
    assert all(".block_sparse_moe.experts." in name for name in packed)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_prefixes_and_flat_layout(prefix: str, broken: Path, expected: Tensor, tmp_path: Path) -> None:
    def flatten(config: dict) -> None:
        text = config.pop("text_config")
        config.clear()
        config.update(text)

    def rename(name: str, raw: Raw) -> dict[str, Raw]:
        if not name.startswith("language_model."):
            return {}
        return {prefix + name.removeprefix("language_model."): raw}

    edit_config(broken, flatten)
    change(broken, rename)
    model = K3ForCausalLM.from_pretrained(broken)
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert read_directory(tmp_path / "saved") == read_directory(broken)


def test_fewer_layers_need_fewer_files(tmp_path: Path) -> None:
    whole = K3ForCausalLM.from_pretrained(released())
    directory = copy_of(tmp_path / "checkpoint")
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    needed = {
        file for name, file in weight_map.items() if re.search(r"layers\.[0-1]\.|embed|\.norm\.|lm_head|output_", name)
    }
    needed -= {file for name, file in weight_map.items() if name.startswith("vision")} - needed
    for file in set(weight_map.values()) - needed:
        (directory / file).write_bytes(b"unreadable")
    assert len(needed) < len(set(weight_map.values()))
    for storage in ("packed", "mapped"):
        model, info = K3ForCausalLM.from_pretrained(
            directory, num_hidden_layers=2, expert_storage=storage, output_loading_info=True
        )
        assert not any(info.values())
        assert len(model.model.layers) == 2
    whole.model.layers = whole.model.layers[:2]
    whole.config.num_hidden_layers = 2
    assert torch.equal(logits(model), logits(whole))


def test_tied_embeddings(broken: Path, tmp_path: Path) -> None:
    edit_config(broken, lambda config: config["text_config"].update(tie_word_embeddings=True))
    change(broken, lambda name, raw: {} if "lm_head" in name else {name: raw})
    for options in ({}, {"device_map": {"": "disk"}}):
        model, info = K3ForCausalLM.from_pretrained(broken, output_loading_info=True, **options)
        assert not any(info.values())
        model.save_pretrained(tmp_path / "saved")
        assert text_of(read_directory(tmp_path / "saved")) == text_of(read_directory(broken))
    tied = K3ForCausalLM.from_pretrained(tmp_path / "saved")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert torch.equal(logits(tied), logits(model))


def test_a_new_head_on_packed_experts(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(released(), num_labels=3)
    assert model(IDS).logits.shape == (1, 3)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


# -- what the model says about itself -------------------------------------------------------------------------------


def test_counts_and_sizes_tell_the_truth() -> None:
    models = {s: K3ForCausalLM.from_pretrained(released(), expert_storage=s) for s in ("dense", "packed", "mapped")}
    weights = {storage: model.num_parameters() for storage, model in models.items()}
    assert len(set(weights.values())) == 1
    sizes = {storage: model.get_memory_footprint() for storage, model in models.items()}
    assert sizes["packed"] == sizes["mapped"] < sizes["dense"]
    stored = sum(len(raw.data) for raw in text_of(read_directory(released())).values())
    # A_log without its padding: 6 layers of 12 entries.
    assert sizes["packed"] == stored - 6 * 12 * 4
    for storage in ("packed", "mapped"):
        assert f"8 experts, 32 -> 32 -> 32, {storage}: 24576 weights in 13056 bytes" in repr(models[storage])
        assert models[storage].num_parameters(only_trainable=True) == weights["dense"] - 8 * 24576 - 64
    mapped = models["mapped"].state_dict()
    name = EXPERT.removeprefix("language_model.")
    raw = read_directory(released())[f"{EXPERT}.weight_packed"]
    assert bytes(mapped[f"{name}.weight_packed"].numpy()) == raw.data


def test_fp32_list_and_bytes_survive_casts() -> None:
    for options in ({}, {"dtype": torch.float16}, {"device_map": {"": "disk"}}):
        model = K3ForCausalLM.from_pretrained(released(), **options)
        kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
        expected = {"A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "e_score_correction_bias"}
        assert {part for name in kept for part in name.split(".")} & expected == expected
        assert all(expected & set(name.split(".")) for name in kept)
    model = K3ForCausalLM.from_pretrained(released()).to(torch.float32)
    assert model.model.layers[1].block_sparse_moe.experts.down_proj_packed.dtype == torch.uint8
    assert logits(model).dtype == torch.float32


@pytest.mark.parametrize("storage", ["packed", "mapped"])
def test_gradients_reach_everything_but_the_experts(storage: str) -> None:
    model = K3ForCausalLM.from_pretrained(released(), dtype=torch.float32, expert_storage=storage).train()
    truth = K3ForCausalLM.from_pretrained(
        released(), dtype=torch.float32, dequantize=True, experts_implementation="eager"
    ).train()
    for each in (model, truth):
        each(IDS, labels=IDS).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in truth.named_parameters():
        if ".experts." in name:
            assert name not in found
        elif parameter.requires_grad:
            assert (found[name] is None) == (parameter.grad is None)
            assert found[name] is None or torch.equal(found[name], parameter.grad), name


def test_changing_weights_never_changes_the_file(broken: Path) -> None:
    before = read_directory(broken)
    model = K3ForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert read_directory(broken) == before


@pytest.mark.parametrize("storage", ["packed", "mapped"])
def test_copies_and_pickles(storage: str, expected: Tensor) -> None:
    model = K3ForCausalLM.from_pretrained(released(), expert_storage=storage)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), expected)
    model.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), expected)


# -- broken checkpoints ---------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"missing.*experts\.3\.w1\.weight_scale"):
        K3ForCausalLM.from_pretrained(broken)


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


# -- saving ---------------------------------------------------------------------------------------------------------


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
        model.save_pretrained(broken)
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == before


def test_vision_that_is_not_there(tmp_path: Path) -> None:
    K3ForCausalLM.from_pretrained(released()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no vision tensors"):
        K3ForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "all", vision=True)
    with pytest.raises(ValueError, match=r"max_shard_size='many'"):
        K3ForCausalLM.from_pretrained(released()).save_pretrained(tmp_path, max_shard_size="many")
