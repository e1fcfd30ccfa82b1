"""Options of `from_pretrained` that meet: nested device maps, forms of experts, quantisation, the library's routes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modeling_k3 import K3ForCausalLM
from modeling_k3.placement import disjoint, is_nested
from modeling_k3.quantizer import K3Mxfp4Config
from tests.checkpoints import read_directory, released, text_of
from tests.models import build, tiny_config

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])
BLOCK = json.loads((released() / "config.json").read_text())["text_config"]["quantization_config"]
EXPERTS = "block_sparse_moe.experts"


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits


def storages(model: Any) -> set[str]:
    return {module.storage for module in model.modules() if hasattr(module, "use_storage")}


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return logits(K3ForCausalLM.from_pretrained(released()))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature with plain bfloat16 experts."""
    directory = tmp_path_factory.mktemp("dense")
    K3ForCausalLM.from_pretrained(released(), dequantize=True).save_pretrained(directory)
    return directory


# -- nested device maps -----------------------------------------------------------------------------------------------


class Part(nn.Module):
    """A linear layer, and a parameter of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(1, 1), nn.Parameter(torch.zeros(1))


def test_the_longest_key_counts() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"x": nn.Linear(1, 1), "y": nn.Linear(1, 1)}), "b": Part()})
    assert disjoint(model, {"": "cpu", "a.x": "disk"}) == {"a.x": "disk", "a.y": "cpu", "b": "cpu"}
    assert disjoint(model, {"a.x": 0, "a": 1, "": 2}) == {"a.x": 0, "a.y": 1, "b": 2}
    assert disjoint(model, {"": "cpu", "b": "disk", "c": 1}) == {"a": "cpu", "b": "disk", "c": 1}
    assert disjoint(model, {"a.x": "cpu", "a.xx": "disk"}) == {"a.x": "cpu", "a.xx": "disk"}
    with pytest.raises(ValueError, match=r"'b\.inner' inside 'b', which has parameters of its own \(own\)"):
        disjoint(model, {"": "cpu", "b.inner": "disk"})
    assert [is_nested(each) for each in ({"": 0, "a": 1}, {"a": 0, "a.x": 1})] == [True, True]
    assert [is_nested(each) for each in ({"a": 0, "ab": 1}, {"": 0}, "auto", None)] == [False] * 4


@pytest.mark.parametrize("device_map", [{"nonsense": "cpu"}, {"model.layers.0": "cpu"}, {"model": "cpu"}, {}])
def test_a_map_has_a_place_for_everything(device_map: dict) -> None:
    with pytest.raises(ValueError, match=r"has no place for \d+ parameters: \S+.*; the key ''"):
        K3ForCausalLM.from_pretrained(released(), device_map=device_map)


@pytest.mark.parametrize("storage", ["packed", "mapped", "dense"])
@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu", "model.layers.3": "disk"},
        {"model.layers.1": "cpu", "": "disk"},
        {"": "cpu", "model": "disk", "model.layers.2": "cpu", f"model.layers.2.{EXPERTS}": "disk"},
        {"": "cpu", **{f"model.layers.{i}.{EXPERTS}": "disk" for i in range(1, 5)}},
        {"": "disk", "model.layers.4.mlp_res_proj": "cpu"},
    ],
)
def test_nested_maps(device_map: dict, storage: str, expected: Tensor, tmp_path: Path) -> None:
    model = K3ForCausalLM.from_pretrained(
        released(), device_map=device_map, expert_storage=storage, experts_implementation="eager"
    )
    for _ in range(2):
        assert torch.equal(logits(model), expected)
    for name, device in device_map.items():
        if name and not name.endswith("experts"):
            inside = [parameter.is_meta for _, parameter in model.get_submodule(name).named_parameters()]
            inner = [key for key in device_map if key.startswith(f"{name}.")]
            assert inner or inside == [device == "disk"] * len(inside)
    if storage != "dense":
        model.save_pretrained(tmp_path)
        assert read_directory(tmp_path) == text_of(read_directory(released()))


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu", "model.layers.3": "disk"}])
def test_packed_experts_on_disk_are_mapped_and_it_says_so(device_map: dict, caplog: pytest.LogCaptureFixture) -> None:
    model = K3ForCausalLM.from_pretrained(released(), device_map=device_map, expert_storage="packed")
    mapped = sum(module.storage == "mapped" for module in model.modules() if hasattr(module, "use_storage"))
    assert mapped and f"packed experts of {mapped} layers are mapped: the device map has them on disk" in caplog.text
    caplog.clear()
    K3ForCausalLM.from_pretrained(released(), expert_storage="packed")
    K3ForCausalLM.from_pretrained(released(), device_map={"": "disk"}, expert_storage="mapped")
    assert "are mapped: the device map" not in caplog.text


# -- experts ----------------------------------------------------------------------------------------------------------


def test_dense_files_are_not_packed_without_a_word(dense: Path) -> None:
    for options in ({"expert_storage": "packed"}, {"quantization_config": K3Mxfp4Config(expert_storage="packed")}):
        with pytest.raises(ValueError, match=r"layers \[1, 2, 3, 4, 5\], \.\.\. are stored dense.*k3 convert"):
            K3ForCausalLM.from_pretrained(dense, **options)
    assert storages(K3ForCausalLM.from_pretrained(dense, expert_storage="mapped")) == {"mapped"}
    assert storages(K3ForCausalLM.from_pretrained(dense)) == {"dense"}
    few = K3ForCausalLM.from_pretrained(dense, num_hidden_layers=1, expert_storage="packed")
    assert storages(few) == set()


@pytest.mark.parametrize(
    ("given", "storage"),
    [
        ({"quant_method": "k3_mxfp4", "expert_storage": "mapped"}, "mapped"),
        ({"quant_method": "k3_mxfp4", "dequantize": True}, "dense"),
        ({**BLOCK, "expert_storage": "mapped"}, "mapped"),
        (BLOCK, "packed"),
    ],
)
def test_quantisation_options_as_a_dictionary(given: dict, storage: str, expected: Tensor) -> None:
    before = dict(given)
    model = K3ForCausalLM.from_pretrained(released(), quantization_config=given, experts_implementation="eager")
    assert given == before
    assert storages(model) == {storage}
    assert torch.equal(logits(model), expected)


def test_quantisation_options_that_are_none() -> None:
    with pytest.raises(TypeError, match="'speed'"):
        K3ForCausalLM.from_pretrained(released(), quantization_config={"quant_method": "k3_mxfp4", "speed": 1})
    with pytest.raises(ValueError, match="expert_storage='zip'"):
        K3ForCausalLM.from_pretrained(released(), quantization_config={**BLOCK, "expert_storage": "zip"})
    with pytest.raises(ValueError, match="K3Mxfp4Config"):
        K3ForCausalLM.from_pretrained(released(), quantization_config={"load_in_4bit": True})


# -- what the library reads -------------------------------------------------------------------------------------------


def test_the_librarys_routes_know_no_packed_experts(dense: Path, tmp_path: Path) -> None:
    mapping = {"^unknown": "known"}
    with pytest.raises(ValueError, match=r"key_mapping with MXFP4 experts.*k3 convert"):
        K3ForCausalLM.from_pretrained(released(), key_mapping=mapping)
    model = K3ForCausalLM.from_pretrained(released())
    with pytest.raises(ValueError, match="state_dict with MXFP4 experts"):
        K3ForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    for storage in ("packed", "mapped"):
        with pytest.raises(ValueError, match=f"expert_storage='{storage}' with key_mapping"):
            K3ForCausalLM.from_pretrained(dense, key_mapping=mapping, expert_storage=storage)
    own = build(tiny_config())
    own.save_pretrained(tmp_path)
    assert torch.equal(logits(K3ForCausalLM.from_pretrained(tmp_path, key_mapping=mapping)), logits(own))


def test_no_images() -> None:
    model = K3ForCausalLM.from_pretrained(released(), num_hidden_layers=1)
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="pixel_values: image input is not supported; allowed is text"):
            call(IDS, pixel_values=torch.zeros(1, 3, 8, 8))
    assert model.generate(IDS, pixel_values=None, max_new_tokens=1, do_sample=False).shape[1] == IDS.shape[1] + 1
