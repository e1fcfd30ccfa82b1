"""K3Config: every entrance reads the same, saving loses nothing, names and depths can be changed."""

import json
import pickle
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from modeling_k3 import K3Config, K3ForCausalLM
from tests.models import token_ids
from tests.unit.helpers import FLAT_CASES, NESTED_CASES, flat_dict, nested_dict

KDA, MLA = "linear_attention", "full_attention"
#: Fields of K3 itself, not the library's.
OWN = {field.name for field in fields(K3Config)} - {field.name for field in fields(K3Config.__mro__[1])}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def content(config: K3Config) -> dict[str, Any]:
    """Everything but where it was read from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def sources() -> list[Any]:
    return [pytest.param(flat_dict(c), id=c) for c in FLAT_CASES] + [
        pytest.param(nested_dict(c), id=c) for c in NESTED_CASES
    ]


SOURCES = pytest.mark.parametrize("source", sources())


# -- entrances and round trips ------------------------------------------------------------------------------------


@SOURCES
def test_every_entrance_reads_the_same(source: dict[str, Any], tmp_path: Path) -> None:
    given, expected = deepcopy(source), K3Config.from_dict(deepcopy(source))
    folder = write(tmp_path, source)
    read = [
        K3Config.from_pretrained(folder),
        K3Config.from_pretrained(str(folder)),
        K3Config.from_pretrained(folder / "config.json"),
        K3Config.from_json_file(folder / "config.json"),
        K3Config.from_dict(given),
    ]
    if "text_config" in source:
        read += [AutoConfig.from_pretrained(folder), K3Config(**given)]
    for config in read:
        assert type(config) is K3Config and content(config) == content(expected)
    assert given == source


@SOURCES
def test_reading_what_was_written_is_a_fixed_point(source: dict[str, Any], tmp_path: Path) -> None:
    config = K3Config.from_dict(source)
    for written in (config.to_dict(), config.to_diff_dict()):
        again = K3Config.from_dict(deepcopy(written))
        assert content(again) == content(config)
        assert again.to_diff_dict() == config.to_diff_dict()
    first, second = tmp_path / "first", tmp_path / "second"
    config.save_pretrained(first)
    AutoConfig.from_pretrained(first).save_pretrained(second)
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()
    assert content(AutoConfig.from_pretrained(second)) == content(config)


@SOURCES
def test_a_saved_file_states_every_field(source: dict[str, Any], tmp_path: Path) -> None:
    """A field at its default is written as well: defaults may change, files do not.

    In the released layout, fields that the release has no word for are written once they say something.
    """
    config = K3Config.from_dict(source)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    text = saved.get("text_config", saved)
    unknown_there = {
        *("mla_norm_eps", "router_input", "output_router_logits", "router_balancing", "router_bias_update_rate"),
        *("router_aux_loss_coef", "moe_expert_capacity_factor"),
    }
    assert set(text) >= OWN - {"released_config"} - (unknown_there if "text_config" in saved else set())
    assert all(text[name] == getattr(config, name) for name in OWN & set(text))
    assert text["architectures"] and text["model_type"] in ("k3", "kimi_linear")


def test_the_default_config_saves_every_field(tmp_path: Path) -> None:
    K3Config().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert set(saved) >= OWN and content(K3Config.from_pretrained(tmp_path)) == content(K3Config())


@SOURCES
def test_copies_are_equal_and_independent(source: dict[str, Any]) -> None:
    config = K3Config.from_dict(source)
    for twin in (deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config and twin.layer_types == config.layer_types
        twin.linear_attn_config["kda_layers"].clear()
        twin.num_hidden_layers = 1
        assert twin != config and config == K3Config.from_dict(source)


@SOURCES
@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 3, "vocab_size": 300},
        {"dtype": "bfloat16", "attn_implementation": "eager", "name_or_path": "x"},
        {"num_experts_per_tok": 1, "layer_types": [KDA]},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_dictionaries_that_are_read_are_not_changed(source: dict[str, Any], changes: dict[str, Any]) -> None:
    given = deepcopy(source)
    K3Config.from_dict(given, **changes)
    assert given == source


def test_a_dictionary_given_to_the_constructor_is_not_shared() -> None:
    linear = {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2]}
    given = deepcopy(linear)
    config = K3Config(num_hidden_layers=2, linear_attn_config=given)
    config.num_hidden_layers = 1
    config.layer_types = [MLA]
    config.linear_attn_config["num_heads"] = 7
    assert given == linear
    other = K3Config(num_hidden_layers=2, linear_attn_config=given)
    other.linear_attn_config["kda_layers"].append(99)
    assert given == linear and K3Config().linear_attn_config["num_heads"] == 4


def test_the_default_config_is_a_working_model() -> None:
    config = K3Config()
    config.validate()
    with torch.no_grad():
        logits = K3ForCausalLM(config)(token_ids(1, 3)).logits
    assert logits.shape == (1, 3, config.vocab_size) and logits.isfinite().all()


def test_only_keywords_are_taken() -> None:
    with pytest.raises(ValueError, match="keyword"):
        K3Config(512)


# -- names --------------------------------------------------------------------------------------------------------

ALIASES = {
    "num_experts_per_tok": ("num_experts_per_token", 3),
    "num_local_experts": ("num_experts", 16),
    "n_routed_experts": ("num_experts", 16),
    "n_shared_experts": ("num_shared_experts", 5),
    "n_group": ("num_expert_group", 2),
    "norm_topk_prob": ("moe_renormalize", False),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_usual_names_are_aliases(alias: str) -> None:
    name, value = ALIASES[alias]
    config = K3Config(**{alias: value})
    assert getattr(config, name) == getattr(config, alias) == value
    config = K3Config()
    setattr(config, alias, value)
    assert getattr(config, name) == value and alias not in config.to_dict() and alias not in config.__dict__
    source = flat_dict()
    source[alias] = source.pop(name)
    assert content(K3Config.from_dict(source)) == content(K3Config.from_dict(flat_dict()))
    assert getattr(K3Config.from_dict(flat_dict(), **{alias: value}), name) == value


@SOURCES
def test_no_rotary_embedding_and_no_head_dim_is_invented(source: dict[str, Any], tmp_path: Path) -> None:
    config = K3Config.from_dict(source)
    assert not any(hasattr(config, name) for name in ("head_dim", "rope_parameters", "rope_theta", "rope_scaling"))
    config.save_pretrained(tmp_path)
    written = (tmp_path / "config.json").read_text()
    assert [line.split(":")[0].strip() for line in written.splitlines() if "rope" in line] == ['"qk_rope_head_dim"']
    assert written.count('"head_dim"') == 1  # in linear_attn_config


def test_the_text_config_of_a_config_is_itself() -> None:
    config = K3Config.from_dict(nested_dict())
    assert config.get_text_config() is config and config.get_text_config(decoder=True) is config
    config.vocab_size = config.hidden_size = 320
    assert K3Config.from_dict(config.to_dict()).vocab_size == 320


def test_kda_numbers_are_read_from_the_linear_block() -> None:
    config = K3Config.from_dict(flat_dict())
    assert (config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size) == (4, 16, 4)
    assert config.use_full_rank_gate is True and config.gate_lower_bound == -5.0
    older = K3Config.from_dict(flat_dict("kimi_linear_like"))
    assert older.use_full_rank_gate is False and older.gate_lower_bound is None


# -- layers -------------------------------------------------------------------------------------------------------


def test_layer_lists_count_from_one() -> None:
    lists = {"kda_layers": [3, 1, 2], "full_attn_layers": [4, 5]}
    config = K3Config(linear_attn_config={"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, **lists})
    assert config.layer_types == [KDA, KDA, KDA, MLA, MLA]


@pytest.mark.parametrize("depth", range(1, 10))
def test_without_lists_every_fourth_and_the_last_layer_attend_fully(depth: int) -> None:
    config = K3Config(num_hidden_layers=depth)
    assert len(config.layer_types) == depth and config.layer_types[-1] == MLA
    assert [i + 1 for i, kind in enumerate(config.layer_types[:-1]) if kind == MLA] == list(range(4, depth, 4))
    config.validate()


@pytest.mark.parametrize("types", [[KDA], [MLA], [MLA, KDA, MLA], [KDA] * 4])
def test_layer_types_may_be_given_in_the_place_of_lists(types: list[str]) -> None:
    config = K3Config(num_hidden_layers=len(types), layer_types=types)
    assert config.layer_types == types
    other = K3Config(num_hidden_layers=len(types))
    other.layer_types = types
    other.validate()
    assert other.layer_types == types and other.linear_attn_config == config.linear_attn_config
    assert K3Config.from_dict(other.to_dict()).layer_types == types


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "dssss"),
        ({"first_k_dense_replace": 0}, "sssss"),
        ({"first_k_dense_replace": 3}, "dddss"),
        ({"first_k_dense_replace": 9}, "ddddd"),
        ({"moe_layer_freq": 2}, "ddsds"),
        ({"moe_layer_freq": 3, "first_k_dense_replace": 0}, "sddsd"),
        ({"num_experts": None}, "ddddd"),
    ],
)
def test_feed_forward_kinds(fields: dict[str, Any], expected: str) -> None:
    config = K3Config(**fields)
    assert "".join(kind[0] for kind in config.mlp_layer_types) == expected
    assert K3Config(**fields, mlp_layer_types=config.mlp_layer_types).mlp_layer_types == config.mlp_layer_types


@SOURCES
def test_a_model_may_be_cut_to_its_first_layers(source: dict[str, Any], tmp_path: Path) -> None:
    """Entries beyond the new depth are dropped by the cut, whichever way it is made."""
    whole, folder = K3Config.from_dict(source), tmp_path / "source"
    whole.save_pretrained(folder)
    by_hand = K3Config.from_dict(source)
    by_hand.num_hidden_layers = 3
    cuts = [
        AutoConfig.from_pretrained(folder, num_hidden_layers=3),
        K3Config.from_pretrained(folder, num_hidden_layers=3),
        K3Config.from_dict(source, num_hidden_layers=3),
        by_hand,
    ]
    for index, config in enumerate(cuts):
        config.validate()
        assert config.layer_types == whole.layer_types[:3] and config.mlp_layer_types == whole.mlp_layer_types[:3]
        config.save_pretrained(tmp_path / str(index))
        assert content(AutoConfig.from_pretrained(tmp_path / str(index))) == content(config)
    assert K3Config.from_dict(source).num_hidden_layers == whole.num_hidden_layers


@pytest.mark.parametrize("depth", [0, 10])
def test_a_cut_that_leaves_no_model_is_refused(depth: int) -> None:
    config = K3Config.from_dict(flat_dict(), num_hidden_layers=depth)
    with pytest.raises(ValueError, match=f"num_hidden_layers={depth}"):
        config.validate()
    with pytest.raises(ValueError, match=f"num_hidden_layers={depth}"):
        K3ForCausalLM(config)


def test_a_config_that_became_invalid_is_not_saved(tmp_path: Path) -> None:
    config = K3Config()
    config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="hidden_act='gelu'"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
