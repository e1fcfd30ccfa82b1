"""What a model loaded from the released layout says about itself, and what can be done with it."""

import copy
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import modeling_k3
from modeling_k3 import K3Config, K3ForCausalLM, K3ForSequenceClassification
from tests.checkpoints import (
    copy_of,
    read_directory,
    released,
    text_of,
)

EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w1"
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


def test_counts_of_layers_and_labels_beside_the_path() -> None:
    for entrance in (K3ForCausalLM, AutoModelForCausalLM):
        assert len(entrance.from_pretrained(released(), num_hidden_layers=3).model.layers) == 3
    model = K3ForSequenceClassification.from_pretrained(released(), num_labels=5)
    assert model.score.weight.shape[0] == 5


@pytest.mark.parametrize("storage", ["packed", "dense"])
def test_load_state_dict_reads_what_was_saved(storage: str, expected: Tensor, tmp_path: Path) -> None:
    """Resumed training loads files by `load_state_dict`, shard by shard: released names, prefix and padding."""
    model = K3ForCausalLM.from_pretrained(released(), expert_storage=storage, experts_implementation="eager")
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        model.load_state_dict(load_file(file), strict=False)
    assert torch.equal(logits(model), expected)
    whole = {name: tensor for file in files for name, tensor in load_file(file).items()}
    result = model.load_state_dict(whole)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    lost = f"{EXPERT}.weight" + ("_scale" if storage == "packed" else "")
    del whole[lost]
    with pytest.raises(RuntimeError, match=r"experts\.3\.w1"):
        model.load_state_dict(whole)


def test_mapped_experts_cannot_be_changed() -> None:
    model = K3ForCausalLM.from_pretrained(released(), expert_storage="mapped")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    state[f"{EXPERT.removeprefix('language_model.')}.weight_scale"].add_(1)
    with pytest.raises(RuntimeError, match="mapped experts cannot be changed"):
        model.load_state_dict(state)


def test_forms_follow_each_other() -> None:
    """Whatever came between, dense stacks have their number format and device back."""
    with torch.device("meta"):
        experts = K3ForCausalLM(K3Config(dtype="bfloat16")).to(torch.bfloat16).model.layers[1].block_sparse_moe.experts
    for storage in ("packed", "mapped", "packed", "dense", "mapped", "dense"):
        experts.use_storage(storage)
        assert all(stack.is_meta for stack in experts.parameters())
        if storage == "dense":
            assert {stack.dtype for stack in experts.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="storage='zip'"):
        experts.use_storage("zip")


_TWO_COPIES = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import modeling_k3
from modeling_k3 import K3ForCausalLM as First
from copied.modeling_k3 import K3ForCausalLM as Second
ids, logits = torch.tensor([[1, 2, 3]]), []
for model_class in (First, Second):
    for storage in (None, "mapped", "packed", "dense"):
        model, info = model_class.from_pretrained(
            sys.argv[2], expert_storage=storage, experts_implementation="eager", output_loading_info=True
        )
        assert not any(info.values())
        assert {m.storage for m in model.modules() if hasattr(m, "storage")} == {storage or "packed"}
        with torch.no_grad():
            logits.append(model(ids).logits)
assert all(torch.equal(each, logits[0]) for each in logits)
"""


def test_two_copies_in_one_process(tmp_path: Path) -> None:
    """The installed package and code from a hub folder: registries are global, and the later import wins."""
    folder = tmp_path / "copied"
    folder.mkdir()
    for file in Path(modeling_k3.__file__).parent.glob("*.py"):
        shutil.copy(file, folder)
    subprocess.run([sys.executable, "-c", _TWO_COPIES, str(tmp_path), str(released())], check=True)
