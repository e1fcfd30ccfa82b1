"""The quantisation block and its config object: read, changed by options, written back as it was."""

import copy
import json

import pytest
import torch
from transformers import FineGrainedFP8Config

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.quantizer import RELEASED_BLOCK, K3Mxfp4Config, check_storage, is_released_block
from tests.checkpoints import released

BLOCK = json.loads((released() / "config.json").read_text())["text_config"]["quantization_config"]


def test_the_block_is_written_back_as_it_was_read() -> None:
    config = K3Mxfp4Config.from_dict(BLOCK)
    assert config.to_dict() == BLOCK
    assert config.to_diff_dict() == BLOCK
    config.to_dict()["ignore"].clear()
    assert config.to_dict() == BLOCK
    assert copy.deepcopy(config).to_dict() == BLOCK
    assert config.get("quant_method") == "k3_mxfp4"


def test_our_own_block_is_a_released_one() -> None:
    assert is_released_block(RELEASED_BLOCK)
    assert is_released_block(BLOCK)
    assert is_released_block(K3Mxfp4Config())
    assert RELEASED_BLOCK.keys() == BLOCK.keys()
    assert RELEASED_BLOCK["config_groups"] == BLOCK["config_groups"]


@pytest.mark.parametrize(
    "block", [None, {}, {"quant_method": "compressed-tensors", "format": "int-quantized"}, {"quant_method": "mxfp4"}]
)
def test_blocks_of_others(block: dict | None) -> None:
    assert not is_released_block(block)


def test_options() -> None:
    assert K3Mxfp4Config(dequantize=True).expert_storage == "dense"
    assert K3Mxfp4Config(expert_storage="dense").dequantize
    assert K3Mxfp4Config(expert_storage="mapped").get_loading_attributes() == {
        "dequantize": False,
        "expert_storage": "mapped",
    }
    for storage, dequantize in (("fast", False), ("packed", True)):
        with pytest.raises(ValueError, match=r"expert_storage="):
            check_storage(storage, dequantize)
        with pytest.raises(ValueError, match=r"expert_storage="):
            K3Mxfp4Config(expert_storage=storage, dequantize=dequantize)


def test_options_through_the_config_object() -> None:
    for storage in ("mapped", "packed", "dense"):
        model = K3ForCausalLM.from_pretrained(released(), quantization_config=K3Mxfp4Config(expert_storage=storage))
        assert {m.storage for m in model.modules() if hasattr(m, "storage")} == {storage}
        assert getattr(model, "is_quantized", False) == (storage != "dense")
        if storage != "dense":
            assert model.config.quantization_config.to_dict() == BLOCK
            again = K3ForCausalLM.from_pretrained(released(), config=model.config)
            assert torch.equal(again(torch.tensor([[1, 2]])).logits, model(torch.tensor([[1, 2]])).logits)


def test_a_config_of_the_user_is_not_changed() -> None:
    config = K3Config.from_pretrained(released())
    before = copy.deepcopy(config.to_dict())
    K3ForCausalLM.from_pretrained(released(), config=config, expert_storage="mapped")
    assert config.to_dict() == before
    assert config.quantization_config == BLOCK


def test_quantised_models_behave_like_the_librarys() -> None:
    model = K3ForCausalLM.from_pretrained(released())
    assert model.hf_quantizer.is_serializable()
    assert model.hf_quantizer.is_trainable
    with pytest.raises(ValueError, match="half"):
        model.half()


def test_another_quantisation_on_top_is_refused() -> None:
    with pytest.raises((ValueError, ImportError), match=r"K3Mxfp4Config"):
        K3ForCausalLM.from_pretrained(released(), quantization_config=FineGrainedFP8Config())
