"""What of a config decides how much memory a model takes, read without torch."""

import json
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from modeling_k3.config_checks import check_depth, check_dimensions
from modeling_k3.config_layout import ALIASES, check_complete, complete_linear, is_kda_layer, is_moe_layer, unwrap
from modeling_k3.configuration import preset_names, preset_path

#: Anything a config can be given as: preset, folder, file, dictionary in either layout, or a K3Config.
Source = str | PathLike | dict[str, Any] | Any


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its number from 0 and what it is made of."""

    index: int
    is_kda: bool
    is_moe: bool
    starts_block: bool


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model under short names; the fields of K3Config they come from stand in `read_shape`.

    Args:
        name: for headings.
        hidden, vocab, inner: D, V and the width of the dense layers.
        heads, key, taps: H, K = V and the convolution's width of KDA.
        full_gate: KDA's output gate is one matrix.
        mla_heads, q_rank, rank, nope, rope, value: of MLA; `q_rank` None: queries are projected directly.
        mla_gate: MLA has an output gate.
        experts, top_k, latent, expert_inner, shared: N (0: none), R, E (None: no latent), F, number of shared experts
            (None: none).
        latent_norm, routes_on_latent: switches of the LatentMoE.
        situ: the activation is SiTU.
        block: layers per AttnRes block, None for plain residuals.
        tied: the head is the embedding.
        stored_as: number format the config names, None where it names none.
        packed: the config says that its checkpoint holds MXFP4 experts.
        layers: one entry each.
    """

    name: str
    hidden: int
    vocab: int
    inner: int
    heads: int
    key: int
    taps: int
    full_gate: bool
    mla_heads: int
    q_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int
    mla_gate: bool
    experts: int
    top_k: int
    latent: int | None
    expert_inner: int
    shared: int | None
    latent_norm: bool
    routes_on_latent: bool
    situ: bool
    block: int | None
    tied: bool
    stored_as: str | None
    packed: bool
    layers: tuple[Layer, ...]

    @property
    def kda_width(self) -> int:
        """H K."""
        return self.heads * self.key

    @property
    def expert_width(self) -> int:
        """E, or D where experts have no latent."""
        return self.latent or self.hidden

    @cached_property
    def num_kda(self) -> int:
        """KDA layers."""
        return sum(layer.is_kda for layer in self.layers)

    @property
    def num_mla(self) -> int:
        """MLA layers."""
        return len(self.layers) - self.num_kda

    @cached_property
    def num_moe(self) -> int:
        """Layers with experts."""
        return sum(layer.is_moe for layer in self.layers)

    @cached_property
    def kinds(self) -> dict[tuple[bool, bool, bool], tuple[Layer, int]]:
        """The last layer of each kind and how many there are; a kind is made of KDA?, experts?, starts a block?"""
        found: dict[tuple[bool, bool, bool], tuple[Layer, int]] = {}
        for layer in self.layers:
            kind = layer.is_kda, layer.is_moe, layer.starts_block
            found[kind] = layer, found.get(kind, (layer, 0))[1] + 1
        return found

    def num_sources(self, layer: int) -> int:
        """Tensors that the first mix of a layer reads: the finished blocks and the running sum."""
        if self.block is None:
            return 1
        return -(-layer // self.block) + 1


def read_shape(source: Source) -> Shape:
    """Read a config from wherever it stands.

    Args:
        source: name of a preset, folder with a `config.json`, the file itself, a dictionary in the flat or the
            released layout, or a K3Config.

    Raises:
        ValueError, TypeError: a field is missing or not allowed; no K3 config.
        FileNotFoundError: no preset, folder or file of this name.
    """
    name, fields = _fields(source)
    config = SimpleNamespace(**fields)
    check_depth(config.num_hidden_layers)
    config.linear_attn_config = complete_linear(config.linear_attn_config, config.num_hidden_layers)
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    check_dimensions(config)
    return _shape(name, config)


def _fields(source: Source) -> tuple[str, dict[str, Any]]:
    """A name and complete flat fields."""
    if isinstance(source, dict):
        return str(source.get("_name_or_path") or "config"), _complete(source)
    if hasattr(source, "linear_attn_config"):
        # A K3Config is complete already; a released one remembers what stood beside it.
        return str(source.name_or_path or "config"), {**vars(source), **_declared(source)}
    if str(source) in preset_names():
        path = preset_path(str(source)) / "config.json"
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(source)!r} is no preset ({', '.join(preset_names())}), no folder with a config.json and no file"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}; allowed is a dictionary")
    return (path.parent.name if path.name == "config.json" else path.stem), _complete(found)


def _complete(found: dict[str, Any]) -> dict[str, Any]:
    fields = check_complete(unwrap(found), ALIASES)
    optional = "dtype torch_dtype quantization_config max_position_embeddings moe_intermediate_size".split()
    return {**dict.fromkeys(optional), "max_position_embeddings": 4096, **dict.fromkeys(["num_experts_per_token"]),
            "first_k_dense_replace": 0, "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
            "moe_router_activation_func": "sigmoid", **fields}  # fmt: skip


def _declared(config: Any) -> dict[str, Any]:
    """Fields of a K3Config that are not attributes of the object itself, or that it keeps as objects."""
    block = vars(config).get("quantization_config")
    block = block if block is None or isinstance(block, dict) else block.to_dict()
    dtype = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    return {"dtype": dtype, "torch_dtype": None, "quantization_config": block}


def _shape(name: str, c: SimpleNamespace) -> Shape:
    linear = c.linear_attn_config
    layers = tuple(
        Layer(
            index=i,
            is_kda=is_kda_layer(linear, i),
            is_moe=is_moe_layer(c.num_experts, c.first_k_dense_replace, c.moe_layer_freq, i),
            starts_block=c.attn_res_block_size is not None and i % c.attn_res_block_size == 0,
        )
        for i in range(c.num_hidden_layers)
    )
    quantization = c.quantization_config or {}
    return Shape(
        name=name,
        hidden=c.hidden_size,
        vocab=c.vocab_size,
        inner=c.intermediate_size,
        heads=linear["num_heads"],
        key=linear["head_dim"],
        taps=linear["short_conv_kernel_size"],
        full_gate=bool(linear.get("use_full_rank_gate")),
        mla_heads=c.num_attention_heads,
        q_rank=c.q_lora_rank,
        rank=c.kv_lora_rank,
        nope=c.qk_nope_head_dim,
        rope=c.qk_rope_head_dim,
        value=c.v_head_dim,
        mla_gate=c.mla_use_output_gate,
        experts=c.num_experts or 0,
        top_k=c.num_experts_per_token or 0,
        latent=c.routed_expert_hidden_size,
        expert_inner=c.moe_intermediate_size or 0,
        shared=c.num_shared_experts,
        latent_norm=c.routed_expert_hidden_size is not None and c.latent_moe_use_norm,
        routes_on_latent=c.router_input == "latent",
        situ=c.hidden_act == "situ",
        block=c.attn_res_block_size,
        tied=c.tie_word_embeddings,
        stored_as=c.dtype or c.torch_dtype,
        packed="mxfp4-pack" in json.dumps(quantization, default=str),
        layers=layers,
    )
