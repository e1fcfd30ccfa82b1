"""K3Config: every number that shapes a K3 model, under the released field names, validated."""

from .supported import VERSIONS_CHECKED  # isort: skip  # noqa: F401
from dataclasses import fields
from os import PathLike
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from .config_checks import check_config, check_depth
from .config_layout import (
    ALIASES,
    DEFAULT_LINEAR,
    FLAT_MODEL_TYPE,
    check_complete,
    complete_linear,
    is_kda_layer,
    is_moe_layer,
    unwrap,
    wrap,
)

_LINEAR = "linear_attention"
_FULL = "full_attention"
#: Fields that the outer dictionary of a released file may state as well.
_ALSO_OUTER = {"vocab_size", "use_cache", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}


class K3Config(PreTrainedConfig):
    """Configuration of a K3 text model.

    Field names are those of the released `config.json`; the library's usual names (`num_experts_per_tok`,
    `norm_topk_prob`, `n_group`, ...) are aliases through `attribute_map`. A released, nested file may be given in
    every entrance (`from_pretrained`, `from_dict`, `from_json_file`, `K3Config(**nested)`); it is unwrapped, and
    what stood beside the text model is kept in `released_config` and written back by `save_pretrained`.

    Defaults describe a tiny model with every K3 part switched on. Files get no defaults for what shapes the
    network: a missing field is an error, an absent switch means "without that part" (`config_layout`).

    Args:
        vocab_size, hidden_size (`int`): V, rows of the embedding and of the head, and D.
        intermediate_size (`int`): inner width of the dense feed-forward layers.
        num_hidden_layers (`int`): decoder layers. Lowering it on a finished config keeps the first layers.
        linear_attn_config (`dict`): the KDA part as released: `num_heads`, `head_dim`, `short_conv_kernel_size`,
            `use_full_rank_gate` (absent: low rank), `gate_lower_bound` (log decay per step, below 0; absent or None:
            softplus gate, unbounded) and the two lists `kda_layers`, `full_attn_layers`, which **count from 1**.
        num_attention_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim (`int`):
            MLA. `q_lora_rank=None` projects queries directly. The "rope" channels are never rotated.
        mla_norm_eps (`float`): epsilon of the two norms inside MLA, 1e-6 in the release.
        mla_use_output_gate (`bool`): sigmoid gate on the attention output.
        attn_res_block_size (`int`): decoder layers per AttnRes block; None for plain residuals.
        hidden_act (`str`): "situ" or "silu", in every feed-forward part.
        activation_situ_beta, activation_situ_linear_beta (`float`): bounds of SiTU's gate (None or 0: 1) and linear
            part (None or 0: unbounded).
        num_experts, num_experts_per_token (`int`): N (None: no experts) and R, the top-k.
        num_shared_experts (`int`): shared experts, fused into one MLP; None: none.
        moe_intermediate_size, routed_expert_hidden_size (`int`): F of one expert; E, latent width, or None: full width.
        latent_moe_use_norm (`bool`): RMSNorm on the combined latent before the up-projection.
        router_input (`str`): "hidden" (released) routes on the full width, "latent" on the latent.
        first_k_dense_replace, moe_layer_freq (`int`): layer i is MoE if i >= first_k_dense_replace and
            i % moe_layer_freq == 0, i from 0.
        moe_router_activation_func (`str`): "sigmoid" or "softmax".
        moe_renormalize (`bool`), routed_scaling_factor (`float`): what happens to the chosen weights.
        num_expert_group, topk_group (`int`): group-limited choice.
        router_balancing (`str`): what evens the load in training only: "quantile", "histogram" (the same from counts),
            "sign" (with `router_bias_update_rate`), "aux_loss" (with `router_aux_loss_coef`) or "none".
        moe_expert_capacity_factor (`float`): in training an expert takes this times an even share of the batch, first
            come, first served: rows and packed documents depend on those before them. None: any number.
        released_config (`dict`): what a released file carried beside the text model; None for a flat config.

    Raises:
        ValueError: a value outside what is allowed, or numbers that do not fit together.
        TypeError: a value of the wrong type.

    Source: config.json of moonshotai/Kimi-K3 (field names), arXiv 2607.24653 (meaning).
    """

    model_type = FLAT_MODEL_TYPE
    # The Trainer would join the batches of all else; attentions hold None where a layer forms no weights.
    keys_to_ignore_at_inference = ["cache", "attentions"]
    attribute_map = dict(ALIASES)
    base_model_tp_plan = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.block_sparse_moe.shared_experts.gate_proj": "colwise",
        "layers.*.block_sparse_moe.shared_experts.up_proj": "colwise",
        "layers.*.block_sparse_moe.shared_experts.down_proj": "rowwise",
        "layers.*.block_sparse_moe.experts.gate_up_proj": "packed_colwise",
        "layers.*.block_sparse_moe.experts.down_proj": "rowwise",
        "layers.*.block_sparse_moe.experts": "moe_tp_experts",
    }
    base_model_ep_plan = {
        "layers.*.block_sparse_moe.experts.gate_up_proj": "grouped_gemm",
        "layers.*.block_sparse_moe.experts.down_proj": "grouped_gemm",
        "layers.*.block_sparse_moe.experts": "ep_dispatch_experts",
    }

    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 5
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    hidden_act: str = "situ"
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0
    attn_res_block_size: int | None = 2
    linear_attn_config: dict[str, Any] | None = None
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    q_lora_rank: int | None = 32
    kv_lora_rank: int = 16
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 16
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    mla_norm_eps: float = 1e-6
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int | None = 8
    num_experts_per_token: int | None = 2
    num_shared_experts: int | None = 1
    moe_intermediate_size: int = 32
    routed_expert_hidden_size: int | None = 32
    latent_moe_use_norm: bool = True
    router_input: str = "hidden"
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    router_balancing: str = "quantile"
    router_bias_update_rate: float = 1e-3
    router_aux_loss_coef: float = 0.0
    moe_expert_capacity_factor: float | None = None
    topk_method: str | None = "noaux_tc"
    use_grouped_topk: bool = True
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    use_cache: bool = True
    output_router_logits: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    released_config: dict[str, Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "K3Config":
        """Remember a released dictionary that is passed as keywords; the fields set from it hide what it stated."""
        config = super().__new__(cls)
        if "text_config" in kwargs:
            config.__dict__["_nested"] = kwargs
        return config

    def __post_init__(self, **kwargs: Any) -> None:
        nested = self.__dict__.pop("_nested", None)
        if nested is not None:
            kwargs = self._take_nested(nested)
        for alias in [name for name in self.attribute_map if name in kwargs]:
            self._take_alias(alias, kwargs.pop(alias))
        check_depth(self.num_hidden_layers)
        layer_types, mlp_layer_types = kwargs.pop("layer_types", None), kwargs.pop("mlp_layer_types", None)
        if layer_types is not None:
            self.layer_types = layer_types
        self._fill_derived()
        check_config(self)
        if mlp_layer_types not in (None, self.mlp_layer_types):
            raise ValueError(
                f"mlp_layer_types={mlp_layer_types} contradicts num_experts, first_k_dense_replace and moe_layer_freq, "
                f"which give {self.mlp_layer_types}"
            )
        super().__post_init__(**kwargs)

    def _take_alias(self, alias: str, value: Any) -> None:
        """Set a field by its other name, unless it was given another value by its own."""
        name = self.attribute_map[alias]
        default = type(self).__dataclass_fields__[name].default
        if getattr(self, name) not in (default, value):
            raise ValueError(f"{alias}={value!r} contradicts {name}={getattr(self, name)!r}: they are one field")
        setattr(self, name, value)

    def _take_nested(self, nested: dict[str, Any]) -> dict[str, Any]:
        """Set the fields of a released dictionary that was passed as keywords; return what is left over."""
        own = {field.name: field for field in fields(self)}
        beside = sorted(set(nested) & set(type(self).__annotations__) - _ALSO_OUTER)
        if not isinstance(nested["text_config"], dict):
            raise TypeError(f"text_config={nested['text_config']!r} must be a dictionary")
        if beside:
            raise ValueError(
                f"{', '.join(f'{name}={nested[name]!r}' for name in beside)} beside text_config would be ignored; "
                "allowed is K3Config.from_dict(nested, name=value), or the entry inside text_config"
            )
        flat = self._read(nested)
        for name, field in own.items():
            setattr(self, name, flat.pop(name, field.default))
        flat.pop("model_type")
        return flat

    def _fill_derived(self) -> None:
        """Spell out what the constructor may leave open: KDA dimensions and the layer lists."""
        self.linear_attn_config = complete_linear(self.linear_attn_config, self.num_hidden_layers)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads

    def __setattr__(self, key: str, value: Any) -> None:
        shrinks = key == "num_hidden_layers" and "linear_attn_config" in self.__dict__ and isinstance(value, int)
        if shrinks and self.linear_attn_config is not None and value < self.num_hidden_layers:
            linear = dict(self.linear_attn_config)
            for name in ("kda_layers", "full_attn_layers"):
                linear[name] = [i for i in linear[name] if i <= value]
            self.linear_attn_config = linear
        super().__setattr__(key, value)

    @property
    def layer_types(self) -> list[str]:
        """Attention of each layer, from the 1-based lists: "linear_attention" (KDA) or "full_attention" (MLA)."""
        linear = self.linear_attn_config
        return [_LINEAR if is_kda_layer(linear, i) else _FULL for i in range(self.num_hidden_layers)]

    @layer_types.setter
    def layer_types(self, types: list[str]) -> None:
        if not isinstance(types, (list, tuple)):
            raise TypeError(f"layer_types={types!r} must be a list of {[_LINEAR, _FULL]}")
        unknown = sorted({str(t) for t in types if t not in (_LINEAR, _FULL)})
        if unknown:
            raise ValueError(f"layer_types contains {unknown}; allowed are {[_LINEAR, _FULL]}")
        self.linear_attn_config = {
            **(self.linear_attn_config or DEFAULT_LINEAR),
            "kda_layers": [i + 1 for i, kind in enumerate(types) if kind == _LINEAR],
            "full_attn_layers": [i + 1 for i, kind in enumerate(types) if kind == _FULL],
        }

    @property
    def mlp_layer_types(self) -> list[str]:
        """Feed-forward part of each layer: "sparse" (LatentMoE) or "dense"."""
        rule = self.num_experts, self.first_k_dense_replace, self.moe_layer_freq
        return ["sparse" if is_moe_layer(*rule, i) else "dense" for i in range(self.num_hidden_layers)]

    @property
    def kda_num_heads(self) -> int:
        """H of the KDA layers."""
        return self.linear_attn_config["num_heads"]

    @property
    def kda_head_dim(self) -> int:
        """K = V, width of one KDA head."""
        return self.linear_attn_config["head_dim"]

    @property
    def short_conv_kernel_size(self) -> int:
        """W, taps of the short convolutions."""
        return self.linear_attn_config["short_conv_kernel_size"]

    @property
    def use_full_rank_gate(self) -> bool:
        """Whether KDA's output gate is one full matrix; absent means low rank."""
        return bool(self.linear_attn_config.get("use_full_rank_gate"))

    @property
    def gate_lower_bound(self) -> float | None:
        """Lower bound of KDA's log decay per step; None selects the softplus gate."""
        return self.linear_attn_config.get("gate_lower_bound")

    @classmethod
    def _dropped_by_library(cls) -> frozenset[str]:
        """Names the base class takes out of a config because they belong to a generation config."""
        own = {field.name for field in fields(cls)}
        return frozenset(set(GenerationConfig._get_default_generation_params()) - own)

    @classmethod
    def _read(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return complete flat fields of a dictionary in either layout."""
        return check_complete(unwrap(config, cls._dropped_by_library()), cls.attribute_map)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read `config.json` in either layout as flat fields."""
        config, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return (unwrap(config, cls._dropped_by_library()) if config else config), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "K3Config":
        """Build from a dictionary in either layout; complete or refused.

        `num_hidden_layers=n` beside the dictionary keeps its first n layers.
        """
        return super().from_dict(cls._read(config_dict), **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | PathLike) -> "K3Config":
        """Build from a JSON file in either layout; complete or refused."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def to_released_dict(self) -> dict[str, Any]:
        """Return the released, nested layout of a config that was read from it.

        Raises:
            ValueError: this config was not read from a released file, so there is no wrapper to write.
        """
        if self.released_config is None:
            raise ValueError("released_config=None: only a config read from the released layout has a wrapper")
        return wrap(super().to_diff_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what `save_pretrained` writes: the layout that was read. Set `released_config=None` for flat."""
        return super().to_diff_dict() if self.released_config is None else self.to_released_dict()

    def validate(self) -> None:
        """Check every field and how they fit together; runs at construction, at save and when a model is built.

        Raises:
            ValueError, TypeError: naming the field, its value and what is allowed.
        """
        check_config(self)
        super().validate()
