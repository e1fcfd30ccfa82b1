"""Every complaint about a config names the field, its value and what is allowed."""

import re
from pathlib import Path
from typing import Any

import pytest

from modeling_k3 import K3Config
from tests.unit.helpers import flat_dict

NAN, INF = float("nan"), float("inf")
GROUPS = {"num_experts": 16, "num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 4}

#: fields, error, and what the message must contain, in this order: the name and the value, then what is allowed.
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"vocab_size": 0}, ValueError, "vocab_size=0 .*at least 1"),
    ({"vocab_size": "5"}, TypeError, "vocab_size='5' .*integer"),
    ({"vocab_size": None}, TypeError, "vocab_size=None .*integer"),
    ({"vocab_size": True}, TypeError, "vocab_size=True .*integer"),
    ({"hidden_size": 64.0}, TypeError, r"hidden_size=64\.0 .*integer"),
    ({"hidden_size": -1}, ValueError, "hidden_size=-1 .*at least 1"),
    ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers=0 .*at least 1"),
    ({"intermediate_size": 0}, ValueError, "intermediate_size=0 .*at least 1"),
    ({"num_attention_heads": 0}, ValueError, "num_attention_heads=0 .*at least 1"),
    ({"num_key_value_heads": 2}, ValueError, "num_key_value_heads=2 .*num_attention_heads=4"),
    ({"kv_lora_rank": None}, TypeError, "kv_lora_rank=None .*integer"),
    ({"q_lora_rank": 0}, ValueError, "q_lora_rank=0 .*at least 1"),
    ({"qk_nope_head_dim": 0}, ValueError, "qk_nope_head_dim=0 .*at least 1"),
    ({"qk_rope_head_dim": -8}, ValueError, "qk_rope_head_dim=-8 .*at least 0"),
    ({"v_head_dim": 0}, ValueError, "v_head_dim=0 .*at least 1"),
    ({"max_position_embeddings": 0}, ValueError, "max_position_embeddings=0 .*at least 1"),
    ({"attn_res_block_size": 0}, ValueError, "attn_res_block_size=0 .*at least 1"),
    ({"attn_res_block_size": 2.5}, TypeError, r"attn_res_block_size=2\.5 .*integer"),
    ({"mla_use_nope": False}, ValueError, "mla_use_nope=False .*rotary"),
    ({"mla_use_output_gate": 1}, TypeError, "mla_use_output_gate=1 .*true or false"),
    ({"tie_word_embeddings": None}, TypeError, "tie_word_embeddings=None .*true or false"),
    ({"use_cache": "no"}, TypeError, "use_cache='no' .*true or false"),
    ({"hidden_act": "gelu"}, ValueError, "hidden_act='gelu' .*'situ', 'silu'"),
    ({"hidden_act": None}, ValueError, "hidden_act=None .*'situ', 'silu'"),
    ({"rms_norm_eps": 0}, ValueError, "rms_norm_eps=0 .*above 0"),
    ({"rms_norm_eps": NAN}, ValueError, "rms_norm_eps=nan .*finite"),
    ({"rms_norm_eps": "1e-5"}, TypeError, "rms_norm_eps='1e-5' .*number"),
    ({"mla_norm_eps": -1e-6}, ValueError, "mla_norm_eps=-1e-06 .*above 0"),
    ({"initializer_range": -0.02}, ValueError, r"initializer_range=-0\.02 .*at least 0"),
    ({"activation_situ_beta": -4.0}, ValueError, r"activation_situ_beta=-4\.0 .*at least 0"),
    ({"activation_situ_linear_beta": INF}, ValueError, "activation_situ_linear_beta=inf .*finite"),
    ({"num_nextn_predict_layers": -1}, ValueError, "num_nextn_predict_layers=-1 .*at least 0"),
    # Experts
    ({"num_experts": 0}, ValueError, "num_experts=0 .*at least 1"),
    ({"num_experts_per_token": 0}, ValueError, "num_experts_per_token=0 .*at least 1"),
    ({"num_experts_per_token": 9}, ValueError, "num_experts_per_token=9 .*at most num_experts=8"),
    ({"num_experts_per_tok": 9}, ValueError, "num_experts_per_token=9 .*at most num_experts=8"),
    ({"num_experts_per_token": None}, TypeError, "num_experts_per_token=None .*integer"),
    ({"num_shared_experts": -1}, ValueError, "num_shared_experts=-1 .*at least 0"),
    ({"moe_intermediate_size": 0}, ValueError, "moe_intermediate_size=0 .*at least 1"),
    ({"routed_expert_hidden_size": 0}, ValueError, "routed_expert_hidden_size=0 .*at least 1"),
    ({"first_k_dense_replace": -1}, ValueError, "first_k_dense_replace=-1 .*at least 0"),
    ({"moe_layer_freq": 0}, ValueError, "moe_layer_freq=0 .*at least 1"),
    ({"moe_layer_freq": [0, 1, 1]}, TypeError, r"moe_layer_freq=\[0, 1, 1\] .*integer"),
    ({"moe_renormalize": 1}, TypeError, "moe_renormalize=1 .*true or false"),
    ({"latent_moe_use_norm": "yes"}, TypeError, "latent_moe_use_norm='yes' .*true or false"),
    ({"routed_scaling_factor": 0.0}, ValueError, r"routed_scaling_factor=0\.0 .*above 0"),
    ({"moe_router_activation_func": "relu"}, ValueError, "moe_router_activation_func='relu' .*'sigmoid', 'softmax'"),
    ({"router_input": "both"}, ValueError, "router_input='both' .*'hidden', 'latent'"),
    ({"router_balancing": "luck"}, ValueError, "router_balancing='luck' .*'quantile'.*'none'"),
    ({"router_balancing": "aux_loss"}, ValueError, "router_aux_loss_coef above 0"),
    ({"router_aux_loss_coef": -0.1}, ValueError, r"router_aux_loss_coef=-0\.1 .*at least 0"),
    ({"router_bias_update_rate": NAN}, ValueError, "router_bias_update_rate=nan .*finite"),
    ({"moe_expert_capacity_factor": 0.0}, ValueError, r"moe_expert_capacity_factor=0\.0 .*above 0"),
    ({"moe_expert_capacity_factor": "2"}, TypeError, "moe_expert_capacity_factor='2' .*number"),
    (
        {"router_input": "latent", "routed_expert_hidden_size": None},
        ValueError,
        "router_input='latent' .*routed_expert_hidden_size.*None",
    ),
    ({"num_expert_group": 3}, ValueError, "num_expert_group=3 .*num_experts=8"),
    ({"num_expert_group": 0}, ValueError, "num_expert_group=0 .*at least 1"),
    ({"topk_group": 0}, ValueError, "topk_group=0 .*at least 1"),
    ({**GROUPS, "topk_group": 5}, ValueError, "topk_group=5 .*at most num_expert_group=4"),
    ({**GROUPS, "num_expert_group": 16}, ValueError, "num_expert_group=16 .*at most 8 groups .*num_experts=16"),
    ({**GROUPS, "num_experts_per_token": 9}, ValueError, "num_experts_per_token=9 .*at most .*8.*topk_group=2"),
    ({"mlp_layer_types": ["sparse"] * 5}, ValueError, r"mlp_layer_types=\['sparse'.*which give \['dense'"),
    # Special ids
    ({"pad_token_id": 163839}, ValueError, "pad_token_id=163839 .*0 to 511.*vocab_size=512.*None"),
    ({"bos_token_id": -1}, ValueError, "bos_token_id=-1 .*0 to 511"),
    ({"eos_token_id": [1, 512]}, ValueError, r"eos_token_id=\[1, 512\] .*0 to 511"),
    ({"eos_token_id": "</s>"}, TypeError, "eos_token_id='</s>' .*integer"),
    ({"pad_token_id": [1]}, TypeError, r"pad_token_id=\[1\] .*integer or None"),
    ({"pad_token_id": True}, TypeError, "pad_token_id=True .*integer or None"),
    # Layer kinds by name
    ({"layer_types": ["mamba"] * 5}, ValueError, r"layer_types .*'mamba'.*'linear_attention', 'full_attention'"),
    ({"layer_types": ["linear_attention"] * 4}, ValueError, r"layers \[5\] .*num_hidden_layers=5"),
    ({"layer_types": ["linear_attention"] * 6}, ValueError, r"kda_layers .*\[6\].*1 to num_hidden_layers=5"),
    ({"linear_attn_config": 5}, TypeError, "linear_attn_config=5 .*dictionary"),
]

#: entries of `linear_attn_config` beside valid lists for 5 layers.
BAD_LINEAR: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_heads": 0}, ValueError, r"linear_attn_config\.num_heads=0 .*at least 1"),
    ({"head_dim": None}, TypeError, r"linear_attn_config\.head_dim=None .*integer"),
    ({"head_dim": 16.5}, TypeError, r"linear_attn_config\.head_dim=16\.5 .*integer"),
    ({"short_conv_kernel_size": 0}, ValueError, r"linear_attn_config\.short_conv_kernel_size=0 .*at least 1"),
    ({"use_full_rank_gate": 1}, TypeError, r"linear_attn_config\.use_full_rank_gate=1 .*true or false"),
    ({"gate_lower_bound": 0.0}, ValueError, r"gate_lower_bound=0\.0 .*\[-5, 0\).*None"),
    ({"gate_lower_bound": -5.1}, ValueError, r"gate_lower_bound=-5\.1 .*\[-5, 0\).*None"),
    ({"gate_lower_bound": 5}, ValueError, r"gate_lower_bound=5 .*\[-5, 0\)"),
    ({"gate_lower_bound": NAN}, ValueError, "gate_lower_bound=nan .*finite"),
    ({"gate_lower_bound": "-5"}, TypeError, "gate_lower_bound='-5' .*number"),
    ({"kda_layers": [0, 1, 2]}, ValueError, r"kda_layers .*\[0\].*1 to num_hidden_layers=5.*from 1"),
    ({"full_attn_layers": [4, 6]}, ValueError, r"full_attn_layers .*\[6\].*1 to num_hidden_layers=5"),
    ({"full_attn_layers": [3, 4, 5]}, ValueError, r"layers \[3\] .*both kda_layers and full_attn_layers"),
    ({"kda_layers": [1, 2]}, ValueError, r"layers \[3\] .*neither .*num_hidden_layers=5"),
    ({"kda_layers": [], "full_attn_layers": []}, ValueError, r"layers \[1, 2, 3, 4, 5\] .*neither"),
    ({"kda_layers": [1, 2, 3, 3]}, ValueError, r"kda_layers=\[1, 2, 3, 3\] .*twice"),
    ({"kda_layers": "123"}, TypeError, "kda_layers='123' .*list of layer numbers"),
    ({"kda_layers": None}, TypeError, "kda_layers=None .*list of layer numbers"),
    ({"kda_layers": [1, 2, True]}, TypeError, r"kda_layers=\[1, 2, True\] .*list of layer numbers"),
    ({"kda_layers": [1.0, 2, 3]}, TypeError, r"kda_layers=\[1\.0, 2, 3\] .*list of layer numbers"),
]
LINEAR: dict[str, Any] = {
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4, 5],
}


def complain(error: type[Exception], pattern: str, call: Any) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error and re.search(pattern, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(("bad", "error", "pattern"), BAD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_bad_fields(bad: dict[str, Any], error: type[Exception], pattern: str, tmp_path: Path) -> None:
    """At construction; and a field that is set later is found when the config is saved or built."""
    complain(error, pattern, lambda: K3Config(**bad))
    if not set(bad) & {"layer_types", "mlp_layer_types", "linear_attn_config", "num_hidden_layers"}:
        config = K3Config()
        config.update(bad)
        complain(error, pattern, config.validate)
        complain(error, pattern, lambda: config.save_pretrained(tmp_path))


@pytest.mark.parametrize(("bad", "error", "pattern"), BAD_LINEAR, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_bad_entries_of_the_linear_block(bad: dict[str, Any], error: type[Exception], pattern: str) -> None:
    complain(error, pattern, lambda: K3Config(linear_attn_config={**LINEAR, **bad}))
    source = {**flat_dict(), "num_hidden_layers": 5, "linear_attn_config": {**LINEAR, **bad}}
    complain(error, pattern, lambda: K3Config.from_dict(source))


@pytest.mark.parametrize(
    "good",
    [
        {},
        GROUPS,
        {"num_expert_group": 8, "topk_group": 8},  # no group is dropped, so none needs two experts
        {"num_expert_group": 1, "topk_group": 4},  # as the reference: no limit without groups
        {"num_experts": None, "num_experts_per_token": None, "num_expert_group": 3},
        {"num_shared_experts": 0},
        {"num_shared_experts": None},
        {"qk_rope_head_dim": 0},
        {"q_lora_rank": None, "attn_res_block_size": None, "routed_expert_hidden_size": None},
        {"attn_res_block_size": 99},
        {"activation_situ_beta": 0, "activation_situ_linear_beta": None},
        {"pad_token_id": 0, "eos_token_id": [1, 511], "bos_token_id": None},
        {"router_input": "latent"},
        {"rms_norm_eps": 1, "routed_scaling_factor": 3},
        {"linear_attn_config": {**LINEAR, "gate_lower_bound": -5}},
        {"linear_attn_config": {**LINEAR, "kda_layers": [], "full_attn_layers": [5, 4, 3, 2, 1]}},
    ],
    ids=str,
)
def test_what_is_allowed(good: dict[str, Any]) -> None:
    config = K3Config(**good)
    config.validate()
    assert K3Config.from_dict(config.to_dict()).to_dict() == config.to_dict()
