"""Config dictionaries as they are found on disk: flat or released, what a file must say, what absence means.

Two layouts are read and written:

* **flat**: one dictionary, `model_type` "k3" (or the community's "kimi_linear" with K3 switches);
* **released**: an outer `kimi_k3` dictionary whose `text_config` (inner `model_type` "kimi_linear") is the
  architecture, beside a vision block and placeholders that the text model does not read.

`unwrap` turns either into flat fields plus one entry, `released_config`, that keeps what stood beside them;
`wrap` puts everything back. Source: config.json of moonshotai/Kimi-K3.
"""

from copy import deepcopy
from typing import Any

FLAT_MODEL_TYPE = "k3"
RELEASED_MODEL_TYPE = "kimi_k3"
RELEASED_TEXT_MODEL_TYPE = "kimi_linear"

#: A config file without one of these does not describe a K3 model: guessing would build a different network.
REQUIRED = (
    "vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim rms_norm_eps hidden_act linear_attn_config"
).split()
REQUIRED_LINEAR = "num_heads head_dim short_conv_kernel_size kda_layers full_attn_layers".split()
#: Needed as soon as `num_experts` is set.
REQUIRED_MOE = (
    "num_experts_per_token moe_intermediate_size first_k_dense_replace moe_layer_freq moe_router_activation_func "
    "moe_renormalize routed_scaling_factor"
).split()
#: What a file means by leaving a switch out: the older member of the family, without that part.
MEANING_OF_ABSENCE: dict[str, Any] = {
    "q_lora_rank": None,
    "num_key_value_heads": None,
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "mla_norm_eps": 1e-6,
    "attn_res_block_size": None,
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "num_experts": None,
    "num_shared_experts": None,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "router_input": "hidden",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
#: What the library writes into the top level of a dictionary on its way to a config class.
_INJECTED = (
    "name_or_path attn_implementation experts_implementation num_labels output_attentions dtype torch_dtype".split()
)
#: Inner keys the text model does not read and that library helpers would misread if they became attributes.
_ROTARY = "head_dim rope_theta rope_scaling rope_parameters".split()
#: Inner keys that the library reads and does not write back while they stand at its defaults.
_LIBRARY_DEFAULTS = (
    "id2label label2id problem_type return_dict output_hidden_states output_attentions chunk_size_feed_forward "
    "is_encoder_decoder"
).split()
#: Fields of ours that the release has no word for; written into its layout only when they say something.
_OURS_AT_REST = {
    "mla_norm_eps": 1e-6,
    "router_input": "hidden",
    "output_router_logits": False,
    "router_balancing": "quantile",
    "router_bias_update_rate": 1e-3,
    "router_aux_loss_coef": 0.0,
    "moe_expert_capacity_factor": None,
}
_KEPT_ASIDE = [*_ROTARY, *"model_type architectures auto_map transformers_version _name_or_path".split()]
#: Other spelling -> released field name.
ALIASES = {
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "model_max_length": "max_position_embeddings",
}
#: KDA of a config written in code that leaves it open.
DEFAULT_LINEAR: dict[str, Any] = {
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "use_full_rank_gate": True,
    "gate_lower_bound": -5.0,
}


def is_released(config: dict[str, Any]) -> bool:
    """Whether `config` is in the released, nested layout."""
    return isinstance(config.get("text_config"), dict)


def unwrap(config: dict[str, Any], dropped_by_library: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return flat fields for a dictionary in either layout; `config` itself is not touched.

    Args:
        config: a flat or a released dictionary.
        dropped_by_library: keys the base config class throws away (generation parameters); for the released
            layout they are kept aside so that a save brings them back.

    Returns:
        A new dictionary with `model_type` "k3". For the released layout it has an entry `released_config` with
        `outer` (everything beside `text_config`) and `text_config` (inner entries that are no fields).

    Raises:
        ValueError: `model_type` is present and belongs to another architecture.
    """
    model_type = config.get("model_type")
    allowed = (FLAT_MODEL_TYPE, RELEASED_MODEL_TYPE, RELEASED_TEXT_MODEL_TYPE, None)
    if model_type not in allowed:
        raise ValueError(f"model_type={model_type!r} is not a K3 config; allowed are {[m for m in allowed if m]}")
    if is_released(config):
        return _unwrap_released(config, dropped_by_library)
    flat = deepcopy(config)
    flat["model_type"] = FLAT_MODEL_TYPE
    for key in _ROTARY:
        flat.pop(key, None)
    if model_type == RELEASED_TEXT_MODEL_TYPE:
        # The file's own class names point at code that is not ours.
        flat.pop("auto_map", None)
        flat["architectures"] = ["K3ForCausalLM"]
    return flat


def is_own_class_map(class_map: Any) -> bool:
    """Whether an `auto_map` names the classes of this code, from a folder or from a repository ("name--file.class")."""
    return isinstance(class_map, dict) and str(class_map.get("AutoConfig")).endswith("configuration_k3.K3Config")


def _unwrap_released(config: dict[str, Any], dropped_by_library: frozenset[str]) -> dict[str, Any]:
    """Lift the text part of a released dictionary; keep the wrapper and the unread inner entries."""
    outer = deepcopy({key: value for key, value in config.items() if key != "text_config"})
    inner = deepcopy(config["text_config"])
    inner_type = inner.get("model_type")
    if inner_type not in (RELEASED_TEXT_MODEL_TYPE, FLAT_MODEL_TYPE, None):
        raise ValueError(f"text_config.model_type={inner_type!r} is not a K3 text model; allowed is 'kimi_linear'")
    inner.pop("auto_map", None)
    class_map = outer.pop("auto_map", None)
    injected = {key: outer.pop(key) for key in _INJECTED if key in outer and key != "dtype"}
    defaults = {key: deepcopy(inner[key]) for key in _LIBRARY_DEFAULTS if key in inner}
    aside = {key: inner.pop(key) for key in list(inner) if key in _KEPT_ASIDE or key in dropped_by_library}
    if "dtype" in outer:
        inner["dtype"] = outer["dtype"]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
        if inner.get(key) is None and outer.get(key) is not None:
            inner[key] = outer[key]
    if "quantization_config" in outer:
        inner["quantization_config"] = deepcopy(outer["quantization_config"])
    flat = {**inner, **injected}
    flat["model_type"] = FLAT_MODEL_TYPE
    flat["architectures"] = ["K3ForCausalLM"]
    if is_own_class_map(class_map):
        # The library looks for the classes of an upload there; a save leaves it to `hub_code`.
        flat["auto_map"] = class_map
    flat["released_config"] = {"outer": outer, "text_config": aside, "defaults": defaults}
    return flat


def wrap(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the released layout of flat fields that carry `released_config`; inverse of `unwrap`.

    The class map of the original (`auto_map`) is not written: it names code files that a save does not write.
    """
    flat = deepcopy(flat)
    kept = flat.pop("released_config")
    outer, aside = kept["outer"], kept["text_config"]
    for key in ("model_type", "architectures", "transformers_version", "auto_map"):
        flat.pop(key, None)
    inner = {**kept.get("defaults", {}), **flat, **aside}
    for key, value in _OURS_AT_REST.items():
        if key in inner and inner[key] == value:
            del inner[key]
    quantization = inner.pop("quantization_config", None)
    if quantization is None:
        outer.pop("quantization_config", None)
    elif "quantization_config" in outer:
        outer["quantization_config"] = quantization
    else:
        inner["quantization_config"] = quantization
    inner.setdefault("model_type", RELEASED_TEXT_MODEL_TYPE)
    for key in ("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "vocab_size"):
        if key in outer and key in inner:
            outer[key] = inner[key]
    return {**outer, "text_config": inner}


def check_complete(flat: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Return `flat` with absent switches spelled out, after making sure that nothing essential is missing.

    Args:
        flat: fields read from a file.
        aliases: other spelling -> released field name.

    Raises:
        ValueError: a required field is missing; names it and the file's entry it belongs to.
    """
    flat = {aliases.get(key, key): value for key, value in flat.items()}
    missing = [name for name in REQUIRED if name not in flat]
    if flat.get("num_experts") is not None:
        missing += [name for name in REQUIRED_MOE if name not in flat]
    linear = flat.get("linear_attn_config")
    if "linear_attn_config" in flat and not isinstance(linear, dict):
        raise TypeError(f"linear_attn_config={linear!r} must be a dictionary with the entries {REQUIRED_LINEAR}")
    if linear is not None:
        missing += [f"linear_attn_config.{name}" for name in REQUIRED_LINEAR if name not in linear]
    if missing:
        raise ValueError(
            f"the config lacks {', '.join(missing)}: a file must state every field that shapes the network "
            "(only K3Config(...) in code has defaults)"
        )
    return {**MEANING_OF_ABSENCE, **flat}


def complete_linear(given: dict[str, Any] | None, depth: int) -> dict[str, Any]:
    """Return `linear_attn_config` with what code may leave open: dimensions, and MLA in every fourth and last layer.

    Raises:
        TypeError: `given` is no dictionary.
    """
    if given is None:
        given = DEFAULT_LINEAR
    if not isinstance(given, dict):
        raise TypeError(f"linear_attn_config={given!r} must be a dictionary")
    linear = deepcopy(given)
    for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
        linear.setdefault(name, DEFAULT_LINEAR[name])
    if "kda_layers" not in linear and "full_attn_layers" not in linear:
        full = [i for i in range(1, depth + 1) if i % 4 == 0 or i == depth]
        linear["full_attn_layers"] = full
        linear["kda_layers"] = [i for i in range(1, depth + 1) if i not in full]
    return linear


def is_kda_layer(linear: dict[str, Any], layer_idx: int) -> bool:
    """Whether layer `layer_idx`, counted from 0, is a KDA layer by the released lists, which count from 1."""
    return layer_idx + 1 in linear["kda_layers"]


def is_moe_layer(num_experts: int | None, first_k_dense_replace: int, moe_layer_freq: int, layer_idx: int) -> bool:
    """Whether layer `layer_idx`, counted from 0, has experts."""
    return num_experts is not None and layer_idx >= first_k_dense_replace and layer_idx % moe_layer_freq == 0
