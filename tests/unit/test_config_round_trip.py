"""Any valid config survives every round trip: a property test over random configs in both layouts."""

import json
from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modeling_k3 import K3Config
from modeling_k3.config_layout import is_released


@st.composite
def valid_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a random valid config, in the names of a file."""
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=8))
    size, groups = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    kept = draw(st.integers(1, groups))
    small, optional = st.integers(1, 9), st.none() | st.integers(1, 9)
    number = st.floats(0.0625, 64, allow_nan=False)
    heads, vocabulary = draw(small), draw(st.integers(8, 99))
    special = st.none() | st.integers(0, vocabulary - 1)
    latent = draw(optional)
    linear: dict[str, Any] = {
        "num_heads": draw(small),
        "head_dim": draw(small),
        "short_conv_kernel_size": draw(small),
        "kda_layers": [i + 1 for i, is_kda in enumerate(kinds) if is_kda],
        "full_attn_layers": [i + 1 for i, is_kda in enumerate(kinds) if not is_kda],
    }
    linear |= draw(st.sampled_from([{}, {"use_full_rank_gate": True}, {"use_full_rank_gate": False}]))
    linear |= draw(st.sampled_from([{}, {"gate_lower_bound": None}, {"gate_lower_bound": -0.5}]))
    return {
        "vocab_size": vocabulary, "hidden_size": draw(small), "intermediate_size": draw(small),
        "num_hidden_layers": len(kinds), "linear_attn_config": linear, "num_attention_heads": heads,
        "q_lora_rank": draw(optional), "kv_lora_rank": draw(small), "qk_nope_head_dim": draw(small),
        "qk_rope_head_dim": draw(st.integers(0, 9)), "v_head_dim": draw(small), "rms_norm_eps": draw(number),
        "hidden_act": draw(st.sampled_from(["situ", "silu"])), "activation_situ_beta": draw(st.none() | number),
        "activation_situ_linear_beta": draw(st.none() | number), "latent_moe_use_norm": draw(st.booleans()),
        "attn_res_block_size": draw(optional), "mla_use_output_gate": draw(st.booleans()),
        "num_experts": draw(st.sampled_from([None, groups * size])), "num_expert_group": groups, "topk_group": kept,
        "num_experts_per_token": draw(st.integers(1, kept * size)), "moe_intermediate_size": draw(small),
        "num_shared_experts": draw(st.none() | st.integers(0, 3)), "routed_expert_hidden_size": latent,
        "router_input": draw(st.sampled_from(["hidden", "latent"] if latent else ["hidden"])),
        "first_k_dense_replace": draw(st.integers(0, 9)), "moe_layer_freq": draw(small),
        "moe_router_activation_func": draw(st.sampled_from(["sigmoid", "softmax"])),
        "moe_renormalize": draw(st.booleans()), "routed_scaling_factor": draw(number),
        "tie_word_embeddings": draw(st.booleans()), "bos_token_id": draw(special), "pad_token_id": draw(special),
        "eos_token_id": draw(special | st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=2)),
    }  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(valid_fields(), st.booleans())
def test_any_valid_config_survives_every_round_trip(source: dict[str, Any], nested: bool) -> None:
    config = K3Config.from_dict(deepcopy(source))
    assert K3Config(**deepcopy(source)).to_dict() == config.to_dict()
    if nested:
        text = {"model_type": "kimi_linear", **deepcopy(source)}
        config = K3Config.from_dict(
            {"model_type": "kimi_k3", "text_config": text, "vision_config": {"vt_hidden_size": 8}}
        )
        assert config.to_released_dict()["vision_config"] == {"vt_hidden_size": 8}
        assert is_released(config.to_diff_dict())
    for name, value in source.items():
        assert getattr(config, name) == value
    for text in (config.to_json_string(), config.to_json_string(use_diff=False)):
        again = K3Config.from_dict(json.loads(text))
        assert again.to_dict() == config.to_dict() and again.to_json_string() == config.to_json_string()
        assert again.layer_types == config.layer_types and again.mlp_layer_types == config.mlp_layer_types
