"""Loading a directory in the released layout, in every form, by every entrance, on every kind of device map."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline

from modeling_k3 import K3ForCausalLM, K3Model, K3Tokenizer
from tests.chat_data import released_folder
from tests.checkpoints import (
    INDEX,
    MIXED,
    Raw,
    change,
    copy_of,
    edit_config,
    read_directory,
    released,
    text_of,
)

CASES = ("mxfp4_release", "mxfp4_release_wide")
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
    model.save_pretrained(broken, vision=True)
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


@pytest.mark.parametrize("subfolder", ["", "inner"])
def test_fewer_layers_fetch_fewer_files(subfolder: str, tmp_path: Path) -> None:
    """From the hub, here a local cache that has nothing else, only the files come that are needed."""
    weight_map = json.loads((released() / INDEX).read_text())["weight_map"]
    needed = {
        file for name, file in weight_map.items() if re.search(r"layers\.[0-1]\.|embed|\.norm\.|lm_head|output_", name)
    }
    assert len(needed) < len(set(weight_map.values()))
    repo = tmp_path / "models--someone--k3"
    snapshot = repo / "snapshots" / "0123456789"
    (snapshot / subfolder).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123456789")
    for file in ("config.json", INDEX, *needed):
        shutil.copy(released() / file, snapshot / subfolder / file)
    (snapshot / subfolder / "generation_config.json").write_text('{"max_new_tokens": 3}')
    options = {"cache_dir": tmp_path, "local_files_only": True, "subfolder": subfolder}
    with pytest.raises(OSError, match=r"safetensors"):
        K3ForCausalLM.from_pretrained("someone/k3", **options)
    for entrance in (K3ForCausalLM, AutoModelForCausalLM):
        model = entrance.from_pretrained("someone/k3", num_hidden_layers=2, **options)
        assert model.name_or_path == model.config.name_or_path == "someone/k3"
        small = entrance.from_pretrained(released(), num_hidden_layers=2)
        assert torch.equal(logits(model), logits(small))
        assert model.generation_config.max_new_tokens == 3


@pytest.mark.parametrize("options", [{}, {"expert_storage": "mapped"}, {"device_map": MIXED}])
def test_pipeline_on_a_released_directory(options: dict, tmp_path: Path) -> None:
    """Weights, config and rank file as a release lays them out, and nothing else."""
    model = K3ForCausalLM.from_pretrained(released())
    torch.manual_seed(0)
    model.resize_token_embeddings(856, mean_resizing=False)
    model.save_pretrained(tmp_path, vision=True, max_shard_size="200KB")
    released_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    device_map = {"device_map": options["device_map"]} if "device_map" in options else {"model_kwargs": options}
    generate = pipeline("text-generation", model=str(tmp_path), **device_map)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "kimi_k3"
    assert type(generate.model) is K3ForCausalLM
    assert type(generate.tokenizer) is K3Tokenizer
    wanted = {"max_new_tokens": 6, "do_sample": False}
    messages = [{"role": "user", "content": "Where is the key?"}]
    for given in ("The key is", messages):
        found = generate(given, return_tensors=True, **wanted)[0]["generated_token_ids"]
        prompt = generate.tokenizer(given) if given != messages else generate.tokenizer.apply_chat_template(given)
        ids = torch.tensor([prompt["input_ids"]])
        assert found == model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)[0].tolist()
    assert generate("The key is", **wanted)[0]["generated_text"].startswith("The key is")
    *_, answer = generate(messages, **wanted)[0]["generated_text"]
    assert answer["role"] == "assistant"


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


@pytest.mark.parametrize("kept", ["language_model.lm_head.weight", "language_model.model.embed_tokens.weight", None])
def test_tied_embeddings_in_two_places(kept: str | None, broken: Path, tmp_path: Path) -> None:
    """One of the two modules that share a matrix is on disk; whichever of the names the file has."""
    edit_config(broken, lambda config: config["text_config"].update(tie_word_embeddings=True))
    matrix = read_directory(broken)[kept or "language_model.lm_head.weight"]

    def share(name: str, raw: Raw) -> dict[str, Raw]:
        is_shared = name.endswith(("lm_head.weight", "embed_tokens.weight"))
        return {name: matrix if is_shared else raw} if not is_shared or kept in (name, None) else {}

    change(broken, share)
    expected = logits(K3ForCausalLM.from_pretrained(broken))
    for one, other in (("cpu", "disk"), ("disk", "cpu"), ("disk", "disk")):
        device_map = {"model": "cpu", "model.embed_tokens": one, "lm_head": other}
        model, info = K3ForCausalLM.from_pretrained(broken, device_map=device_map, output_loading_info=True)
        assert not any(info.values())
        for _ in range(2):
            assert torch.equal(logits(model), expected)
        model.save_pretrained(tmp_path / "saved")
        assert read_directory(tmp_path / "saved") == text_of(read_directory(broken))
        assert torch.equal(logits(K3ForCausalLM.from_pretrained(tmp_path / "saved")), expected)


def test_a_new_head_on_packed_experts(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(released(), num_labels=3)
    assert model(IDS).logits.shape == (1, 3)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
