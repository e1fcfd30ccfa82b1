"""What a card reads off a model: its parts, and the forms of its weights."""

from pathlib import Path
from typing import Any

import pytest
from transformers import BitsAndBytesConfig

from modeling_k3 import K3ForCausalLM
from modeling_k3.hub_facts import describe
from modeling_k3.low_bits import quantize_experts
from tests.checkpoints import released
from tests.models import VARIANTS, build, tiny_config
from tests.unit.test_hub_card import card_of


@pytest.mark.parametrize(
    ("changes", "says", "tags"),
    [
        (
            {},
            "Kimi Delta Attention, gated multi-head latent attention without positions, attention over depth and a "
            "mixture of experts computed in a latent",
            ["k3", "linear-attention", "mixture-of-experts"],
        ),
        (
            {**VARIANTS["plain_residual"], **VARIANTS["no_output_gate"], **VARIANTS["full_width_moe"]},
            "Kimi Delta Attention, multi-head latent attention without positions and a mixture of experts",
            ["k3", "linear-attention", "mixture-of-experts"],
        ),
        (
            {"layers": "MMM", "num_experts": None},
            "gated multi-head latent attention without positions and attention over depth",
            ["k3"],
        ),
        (
            {"layers": "KK", "num_experts": None, "attn_res_block_size": None},
            "Kimi Delta Attention",
            ["k3", "linear-attention"],
        ),
    ],
    ids=["k3", "kimi-linear", "mla-only", "kda-only"],
)
def test_a_card_names_the_parts_that_are_there(changes: dict[str, Any], says: str, tags: list[str]) -> None:
    data, body = card_of(build(tiny_config(**changes)))
    assert f"\nA decoder with {says}.\n" in body and data["tags"] == tags


def test_a_card_names_the_forms_that_are_there(tmp_path: Path) -> None:
    """Few bits by their name, and what reading them needs; mapped experts by what the files hold."""
    packed = K3ForCausalLM.from_pretrained(released(), dtype="auto")
    _, body = card_of(packed)
    assert "mxfp4" in dict(describe(packed))["weights"] and "loading needs" not in body
    build(tiny_config()).save_pretrained(tmp_path)
    plain = K3ForCausalLM.from_pretrained(tmp_path, expert_storage="mapped")
    assert dict(describe(plain))["format"] == "float32" and "in files" not in dict(describe(plain))["weights"]
    pytest.importorskip("hqq")
    low = build(tiny_config())
    quantize_experts(low, 3)
    _, body = card_of(low)
    assert "| format | routed experts in 3 bits (HQQ), the rest float32 |" in body and "MXFP4" not in body
    assert "loading needs `pip install hqq` as well" in body
    pytest.importorskip("bitsandbytes")
    options = BitsAndBytesConfig(load_in_8bit=True)
    _, body = card_of(K3ForCausalLM.from_pretrained(tmp_path, quantization_config=options, expert_storage="dense"))
    assert "| format | linear layers INT8 (bitsandbytes), the rest float32 |" in body
    assert "loading needs `pip install bitsandbytes` as well" in body
