"""Shapes in which small K3 checkpoints are passed around, in the released layout: they load, save and compute."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from modeling_k3 import K3Config, K3ForCausalLM
from tests.models import randomize

GOLDEN = Path(__file__).parents[1] / "golden" / "mxfp4_release" / "checkpoint" / "config.json"


def lists(depth: int) -> dict[str, list[int]]:
    """Every fourth layer and the last are MLA."""
    full = [i for i in range(1, depth + 1) if i % 4 == 0 or i == depth]
    return {"full_attn_layers": full, "kda_layers": [i for i in range(1, depth + 1) if i not in full]}


def eight_layers_without_lower_bound(text: dict[str, Any]) -> None:
    text.update(num_hidden_layers=8, linear_attn_config={**text["linear_attn_config"], **lists(8)})
    del text["linear_attn_config"]["gate_lower_bound"]


def many_layers_forty_experts(text: dict[str, Any]) -> None:
    text.update(num_hidden_layers=24, linear_attn_config={**text["linear_attn_config"], **lists(24)})
    text.update(num_experts=40, num_experts_per_token=4, attn_res_block_size=12)


def dense_with_fourteen_heads(text: dict[str, Any]) -> None:
    text.update(num_attention_heads=14, num_key_value_heads=14)
    text["linear_attn_config"].update(num_heads=14)
    for name in [name for name in text if "expert" in name or name.startswith("moe_")]:
        del text[name]


def own_vocabulary_and_tied(text: dict[str, Any]) -> None:
    text.update(vocab_size=8192, tie_word_embeddings=True)


@pytest.mark.parametrize(
    "change",
    [
        eight_layers_without_lower_bound,
        many_layers_forty_experts,
        dense_with_fourteen_heads,
        own_vocabulary_and_tied,
    ],
    ids=lambda change: change.__name__,
)
def test_a_small_release_loads_saves_and_computes(change: Any, tmp_path: Path) -> None:
    nested = deepcopy(json.loads(GOLDEN.read_text()))
    del nested["text_config"]["quantization_config"], nested["tie_word_embeddings"]
    nested["dtype"] = nested["text_config"]["dtype"] = "float32"
    change(nested["text_config"])
    model = K3ForCausalLM(K3Config.from_dict(nested))
    randomize(model, seed=0)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "kimi_k3"
    ids = torch.randint(0, again.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = again(ids).logits
        assert logits.isfinite().all() and torch.equal(logits, model.eval()(ids).logits)
    tied = again.lm_head.weight is again.model.embed_tokens.weight
    assert tied == nested["text_config"].get("tie_word_embeddings", False)


@pytest.mark.parametrize("name", ["pixel_values", "image_embeds"])
def test_images_are_refused(name: str) -> None:
    model = K3ForCausalLM(K3Config())
    with pytest.raises(ValueError, match=f"{name}: image input is not supported"):
        model(torch.ones(1, 2, dtype=torch.long), **{name: torch.zeros(1)})
