"""What makes a K3 config valid. Every complaint names the field, its value and what is allowed.

Importable without torch: the memory planner checks the dimensions of a file that no model is built from.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pragma: no cover
    from transformers import PreTrainedConfig

HIDDEN_ACTS = ("situ", "silu")
ROUTER_FUNCTIONS = ("sigmoid", "softmax")
ROUTER_INPUTS = ("hidden", "latent")
ROUTER_BALANCING = ("quantile", "histogram", "sign", "aux_loss", "none")

_LINEAR_KEYS = {
    *("num_heads", "head_dim", "short_conv_kernel_size", "kda_layers", "full_attn_layers"),
    *("use_full_rank_gate", "gate_lower_bound"),
}
_COUNTS = (
    "vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads num_key_value_heads kv_lora_rank "
    "qk_nope_head_dim v_head_dim max_position_embeddings moe_layer_freq num_expert_group topk_group"
).split()
_OPTIONAL_COUNTS = "q_lora_rank attn_res_block_size num_experts routed_expert_hidden_size".split()
_FROM_ZERO = "qk_rope_head_dim first_k_dense_replace num_nextn_predict_layers".split()
_SWITCHES = (
    "mla_use_nope mla_use_output_gate use_grouped_topk moe_renormalize latent_moe_use_norm tie_word_embeddings "
    "use_cache output_router_logits"
).split()


def check_config(config: "PreTrainedConfig") -> None:
    """Check a K3Config, field by field, then how the fields fit together.

    Raises:
        ValueError: a value outside what is allowed, or numbers that contradict each other.
        TypeError: a value of the wrong type.
    """
    _check_library_fields(config)
    check_dimensions(config)
    for name in _SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise TypeError(f"{name}={getattr(config, name)!r} must be true or false")
    _require_choice("hidden_act", config.hidden_act, HIDDEN_ACTS)
    for name in ("rms_norm_eps", "mla_norm_eps"):
        _require_number(name, getattr(config, name), above=0.0)
    _require_number("initializer_range", config.initializer_range, at_least=0.0)
    for name in ("activation_situ_beta", "activation_situ_linear_beta"):
        if getattr(config, name) is not None:
            _require_number(name, getattr(config, name), at_least=0.0)
    _check_mla(config)
    if config.num_experts is not None:
        _check_experts(config)
    _check_special_ids(config)


def check_dimensions(config: Any) -> None:
    """Check the numbers that decide how large a model is; `config` is a K3Config or anything with its fields.

    Raises:
        ValueError, TypeError: as `check_config`.
    """
    for name in _COUNTS:
        _require_int(name, getattr(config, name), 1)
    for name in _OPTIONAL_COUNTS:
        if getattr(config, name) is not None:
            _require_int(name, getattr(config, name), 1)
    for name in _FROM_ZERO:
        _require_int(name, getattr(config, name), 0)
    _check_kda(config.linear_attn_config)
    _check_layer_lists(config.linear_attn_config, config.num_hidden_layers)
    if config.num_experts is not None:
        _check_expert_counts(config)


def check_depth(num_hidden_layers: Any) -> None:
    """Check what the layer lists are filled from."""
    _require_int("num_hidden_layers", num_hidden_layers, 1)


def _check_library_fields(config: "PreTrainedConfig") -> None:
    """Check what the library would take and only fail on later."""
    import torch

    dtype = config.dtype
    if dtype is not None:
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(f"dtype={dtype!r} is no floating-point dtype; allowed are e.g. 'bfloat16' and 'float32'")
    kept = config.released_config
    if kept is not None and not (isinstance(kept, dict) and {"outer", "text_config"} <= set(kept)):
        raise TypeError(f"released_config={kept!r} must be None or what reading a released config has put there")


def _check_kda(linear: Any) -> None:
    if not isinstance(linear, dict):
        raise TypeError(f"linear_attn_config={linear!r} must be a dictionary")
    unknown = sorted(set(linear) - _LINEAR_KEYS)
    if unknown:
        from transformers.utils import logging

        logging.get_logger(__name__).warning_once(
            f"linear_attn_config: {unknown} are not read; known are {sorted(_LINEAR_KEYS)}"
        )
    for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
        _require_int(f"linear_attn_config.{name}", linear.get(name), 1)
    full_rank = linear.get("use_full_rank_gate", False)
    if not isinstance(full_rank, bool):
        raise TypeError(f"linear_attn_config.use_full_rank_gate={full_rank!r} must be true or false")
    bound = linear.get("gate_lower_bound")
    if bound is not None:
        _require_number("linear_attn_config.gate_lower_bound", bound)
        if not -5.0 <= bound < 0.0:
            raise ValueError(
                f"linear_attn_config.gate_lower_bound={bound!r} must lie in [-5, 0): it bounds a log decay, and the "
                "kernels of this family are exact in float32 only down to -5; None selects the softplus gate"
            )


def _check_layer_lists(linear: dict[str, Any], depth: int) -> None:
    lists = {}
    for name in ("kda_layers", "full_attn_layers"):
        layers = linear.get(name)
        if not isinstance(layers, (list, tuple)) or not all(type(i) is int for i in layers):
            raise TypeError(f"linear_attn_config.{name}={layers!r} must be a list of layer numbers counted from 1")
        outside = [i for i in layers if not 1 <= i <= depth]
        if outside:
            raise ValueError(
                f"linear_attn_config.{name} contains {outside}; allowed are 1 to num_hidden_layers={depth} "
                "(layers are counted from 1)"
            )
        if len(set(layers)) != len(layers):
            raise ValueError(f"linear_attn_config.{name}={list(layers)} names a layer twice")
        lists[name] = set(layers)
    both = sorted(lists["kda_layers"] & lists["full_attn_layers"])
    if both:
        raise ValueError(f"linear_attn_config: layers {both} stand in both kda_layers and full_attn_layers")
    neither = sorted(set(range(1, depth + 1)) - lists["kda_layers"] - lists["full_attn_layers"])
    if neither:
        raise ValueError(
            f"linear_attn_config: layers {neither} stand in neither kda_layers nor full_attn_layers "
            f"(num_hidden_layers={depth}); every layer needs exactly one kind"
        )


def _check_mla(config: "PreTrainedConfig") -> None:
    if config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"num_key_value_heads={config.num_key_value_heads} must equal "
            f"num_attention_heads={config.num_attention_heads}: MLA expands one latent to every head"
        )
    if not config.mla_use_nope:
        raise ValueError("mla_use_nope=False is not allowed: K3's attention has no rotary embedding")


def _check_expert_counts(config: Any) -> None:
    experts, top_k = config.num_experts, config.num_experts_per_token
    _require_int("num_experts_per_token", top_k, 1)
    _require_int("moe_intermediate_size", config.moe_intermediate_size, 1)
    if top_k > experts:
        raise ValueError(f"num_experts_per_token={top_k} must be at most num_experts={experts}")
    if config.num_shared_experts is not None:
        _require_int("num_shared_experts", config.num_shared_experts, 0)


def _check_experts(config: "PreTrainedConfig") -> None:
    experts, top_k = config.num_experts, config.num_experts_per_token
    _require_choice("moe_router_activation_func", config.moe_router_activation_func, ROUTER_FUNCTIONS)
    _require_choice("router_input", config.router_input, ROUTER_INPUTS)
    if config.router_input == "latent" and config.routed_expert_hidden_size is None:
        raise ValueError("router_input='latent' needs routed_expert_hidden_size (a latent to route on), got None")
    _require_number("routed_scaling_factor", config.routed_scaling_factor, above=0.0)
    _require_choice("router_balancing", config.router_balancing, ROUTER_BALANCING)
    for name in ("router_bias_update_rate", "router_aux_loss_coef"):
        _require_number(name, getattr(config, name), at_least=0.0)
    if config.router_balancing == "aux_loss" and not config.router_aux_loss_coef:
        raise ValueError("router_balancing='aux_loss' needs a router_aux_loss_coef above 0, got 0")
    if config.moe_expert_capacity_factor is not None:
        _require_number("moe_expert_capacity_factor", config.moe_expert_capacity_factor, above=0.0)
    groups, kept = config.num_expert_group, config.topk_group
    if experts % groups:
        raise ValueError(f"num_expert_group={groups} must divide num_experts={experts}")
    if groups > 1 and kept > groups:
        raise ValueError(f"topk_group={kept} must be at most num_expert_group={groups}")
    if groups > kept:
        size = experts // groups
        if size < 2:
            raise ValueError(
                f"num_expert_group={groups} leaves {size} expert per group; groups are ranked by their two best, "
                f"so at most {experts // 2} groups are allowed for num_experts={experts}"
            )
        if top_k > kept * size:
            raise ValueError(
                f"num_experts_per_token={top_k} must be at most topk_group * group size = {kept * size} "
                f"(topk_group={kept}, num_expert_group={groups}, num_experts={experts})"
            )


def _check_special_ids(config: "PreTrainedConfig") -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        if name == "eos_token_id" and isinstance(value, (list, tuple)) and not value:
            raise ValueError("eos_token_id=[] ends nothing; allowed are None, an id, or a list of ids")
        for token in value if isinstance(value, (list, tuple)) and name == "eos_token_id" else [value]:
            if token is None:
                continue
            if type(token) is not int:
                raise TypeError(f"{name}={value!r} must be an integer or None")
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"{name}={value!r} lies outside the vocabulary: allowed are 0 to {config.vocab_size - 1} "
                    f"(vocab_size={config.vocab_size}), or None"
                )


def _require_int(name: str, value: Any, at_least: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name}={value!r} must be an integer of at least {at_least}")
    if value < at_least:
        raise ValueError(f"{name}={value} must be at least {at_least}")


def _require_number(name: str, value: Any, *, above: float | None = None, at_least: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} must be a number")
    if not (abs(value) < float("inf")):
        raise ValueError(f"{name}={value!r} must be finite")
    if above is not None and not value > above:
        raise ValueError(f"{name}={value!r} must be above {above}")
    if at_least is not None and not value >= at_least:
        raise ValueError(f"{name}={value!r} must be at least {at_least}")


def _require_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed are {list(allowed)}")
