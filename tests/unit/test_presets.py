"""Presets are found by name, and by name only; each builds, and the released one has the released tensors."""

import json
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.configuration import preset_names, preset_path
from tests.unit.helpers import GOLDEN, read_json

MANIFEST = GOLDEN / "full_manifest.json"
#: The released model's parameters that take part in one token, without the row looked up in the embedding.
ACTIVE = 104_189_612_640

Shapes = dict[str, tuple[int, ...]]
#: Name with {i} for the layer and {e} for the expert, kind of its attention or "", shape.
Tensor = tuple[str, str, tuple[int, ...]]
PRESETS = pytest.mark.parametrize("name", preset_names())


def shapes_of(name: str) -> Shapes:
    """Parameter shapes of a preset, built without memory."""
    with torch.device("meta"):
        model = K3ForCausalLM(K3Config.from_pretrained(preset_path(name)))
    assert all(parameter.is_meta for parameter in model.parameters()) and not list(model.buffers())
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def released() -> Shapes:
    return shapes_of("kimi-k3")


def total(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def unstacked(shapes: Shapes) -> Counter[Tensor]:
    """How often each tensor occurs, experts one by one; `o_proj` and `g_proj` belong to both kinds of attention."""
    kda = {name.split(".")[2] for name in shapes if name.endswith("A_log")}
    found: Counter[Tensor] = Counter()
    for name, shape in shapes.items():
        pattern, kind = re.sub(r"(?<=layers\.)\d+", "{i}", name), ""
        if ".self_attn." in name:
            kind = "kda" if name.split(".")[2] in kda else "mla"
        if pattern.endswith("experts.gate_up_proj"):
            stem, (count, double, width) = pattern.removesuffix("gate_up_proj"), shape
            for half in ("w1", "w3"):
                found[f"{stem}{{e}}.{half}.weight", kind, (double // 2, width)] += count
        elif pattern.endswith(".experts.down_proj"):
            count, *rest = shape
            found[pattern.removesuffix("down_proj") + "{e}.w2.weight", kind, tuple(rest)] += count
        else:
            found[pattern, kind, shape] += 1
    return found


def listed(value: str) -> dict[Tensor, Any]:
    """An entry of every tensor pattern in the manifest."""
    return {
        (entry["name"], entry["layers"] if ".self_attn." in entry["name"] else "", tuple(entry["shape"])): entry[value]
        for entry in read_json(MANIFEST)["tensors"]
    }


def test_every_name_leads_to_a_config() -> None:
    for name in preset_names():
        folder = preset_path(name)
        assert folder.is_absolute() and folder.name == name
        assert json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert {"kimi-k3", "tiny", "pico", "small"} <= set(preset_names())


@pytest.mark.parametrize("name", ["no-such-preset", "", ".", "../modeling_k3", "tiny/", "/"])
def test_anything_else_is_refused_with_the_names(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        preset_path(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in preset_names())


@PRESETS
def test_every_preset_is_a_complete_valid_config_that_builds(name: str) -> None:
    source = read_json(preset_path(name) / "config.json")
    config = K3Config.from_pretrained(preset_path(name))
    config.validate()
    assert all(getattr(config, field) == value for field, value in source.items() if field != "dtype")
    written = config.to_diff_dict()
    spelled_out = set(written) - {"released_config", "transformers_version", "output_router_logits"}
    assert spelled_out <= set(source), "a preset states every field"
    assert shapes_of(name)["lm_head.weight"] == (config.vocab_size, config.hidden_size)


@PRESETS
def test_special_ids_of_the_two_files_agree(name: str) -> None:
    config = read_json(preset_path(name) / "config.json")
    generation = read_json(preset_path(name) / "generation_config.json")
    assert generation["pad_token_id"] == config["pad_token_id"]
    ends = generation["eos_token_id"]
    assert config["eos_token_id"] in (ends if isinstance(ends, list) else [ends])
    assert all(0 <= end < config["vocab_size"] for end in (ends if isinstance(ends, list) else [ends]))
    assert config["pad_token_id"] not in (ends if isinstance(ends, list) else [ends])


# -- the released model -------------------------------------------------------------------------------------------


def test_every_released_tensor_has_its_parameter(released: Shapes) -> None:
    """Names, shapes and counts, one entry for each tensor pattern; nothing is left over on either side."""
    expected = listed("count")
    assert dict(unstacked(released)) == expected
    assert sum(expected.values()) == read_json(MANIFEST)["totals"]["text_module_tensors"]


def test_components_and_totals_equal_the_manifest(released: Shapes) -> None:
    manifest = read_json(MANIFEST)
    owner, parameters = listed("component"), Counter[str]()
    for tensor, count in unstacked(released).items():
        parameters[owner[tensor]] += math.prod(tensor[2]) * count
    assert dict(parameters) == {name: part["parameters"] for name, part in manifest["components"].items()}
    assert total(released) == manifest["totals"]["text_parameters"] == 2_779_484_476_000


def test_layers_are_of_the_released_kinds(released: Shapes) -> None:
    manifest, config = read_json(MANIFEST), K3Config.from_pretrained(preset_path("kimi-k3"))
    kinds = {"linear_attention": manifest["kda_layers"], "full_attention": manifest["mla_layers"]}
    assert {k: [i for i, t in enumerate(config.layer_types) if t == k] for k in kinds} == kinds
    assert [i for i, kind in enumerate(config.mlp_layer_types) if kind == "dense"] == manifest["dense_layers"]
    size = config.attn_res_block_size
    assert [i for i in range(config.num_hidden_layers) if i % size == 0] == manifest["attn_res_block_starts"]
    kda = {int(name.split(".")[2]) for name in released if name.endswith("A_log")}
    assert sorted(kda) == manifest["kda_layers"]


def test_active_parameters_of_a_token(released: Shapes) -> None:
    """Of 896 experts 16 take part; the embedding is a lookup. Also by a formula from the config alone."""
    config = K3Config.from_pretrained(preset_path("kimi-k3"))
    share = {True: config.num_experts_per_token / config.num_experts, False: 1.0}
    counted = sum(math.prod(shape) * share[".experts." in name] for name, shape in released.items())
    assert counted - math.prod(released["model.embed_tokens.weight"]) == ACTIVE
    assert _active_by_formula(config.to_dict()) == ACTIVE
    assert read_json(MANIFEST)["totals"]["text_parameters_active_per_token_without_embedding_lookup"] == ACTIVE


def _active_by_formula(c: dict[str, Any]) -> int:
    linear, hidden, heads = c["linear_attn_config"], c["hidden_size"], c["num_attention_heads"]
    width, size = linear["num_heads"] * linear["head_dim"], linear["head_dim"]
    kda = 5 * hidden * width + 3 * width * linear["short_conv_kernel_size"]  # q, k, v, gate, output; convolutions
    kda += hidden * size + size * width + width + hidden * linear["num_heads"] + linear["num_heads"] + size
    key, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
    mla = c["q_lora_rank"] * (hidden + 1 + heads * key) + hidden * (c["kv_lora_rank"] + c["qk_rope_head_dim"])
    mla += c["kv_lora_rank"] * (1 + heads * (c["qk_nope_head_dim"] + value)) + 2 * hidden * heads * value
    latent, inner = c["routed_expert_hidden_size"], c["moe_intermediate_size"]
    moe = c["num_experts_per_token"] * 3 * latent * inner + c["num_shared_experts"] * 3 * hidden * inner
    moe += c["num_experts"] * (hidden + 1) + 2 * hidden * latent + latent
    dense, layers = 3 * hidden * c["intermediate_size"], c["num_hidden_layers"]
    mixed = len(linear["kda_layers"]) * kda + len(linear["full_attn_layers"]) * mla
    fed = c["first_k_dense_replace"] * dense + (layers - c["first_k_dense_replace"]) * moe
    return mixed + fed + (layers * 6 + 3) * hidden + c["vocab_size"] * hidden


# -- the small ones -----------------------------------------------------------------------------------------------


def test_sizes_of_the_small_presets() -> None:
    assert 3e6 < total(shapes_of("pico")) < 6e6
    assert 4e8 < total(shapes_of("small")) < 6e8
    assert total(shapes_of("tiny")) < 1e6


@pytest.mark.parametrize("name", ["tiny", "pico", "small"])
def test_small_presets_have_every_kind_of_layer(name: str) -> None:
    config = K3Config.from_pretrained(preset_path(name))
    kinds = list(zip(config.layer_types, config.mlp_layer_types, strict=True))
    assert {("linear_attention", "dense"), ("linear_attention", "sparse"), ("full_attention", "sparse")} <= set(kinds)
    size = config.attn_res_block_size
    starts = [i for i in range(config.num_hidden_layers) if i % size == 0]
    assert len(starts) > 1 and len(starts) < config.num_hidden_layers
    full = K3Config.from_pretrained(preset_path("kimi-k3"))
    for field in ("hidden_act", "router_input", "latent_moe_use_norm", "mla_use_output_gate", "moe_renormalize"):
        assert getattr(config, field) == getattr(full, field)
    assert config.gate_lower_bound == full.gate_lower_bound and config.use_full_rank_gate == full.use_full_rank_gate


def test_tiny_starts_blocks_at_both_kinds_of_attention_and_feed_forward() -> None:
    config = K3Config.from_pretrained(preset_path("tiny"))
    starts = range(0, config.num_hidden_layers, config.attn_res_block_size)
    assert {config.layer_types[i] for i in starts} == {"linear_attention", "full_attention"}
    assert {config.mlp_layer_types[i] for i in starts} == {"dense", "sparse"}
    assert config.num_hidden_layers % config.attn_res_block_size
    assert config.layer_types[-2:] == ["full_attention"] * 2
