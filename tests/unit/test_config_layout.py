"""Two layouts of one config: what is lifted, what is kept aside and written back, and what a file must state."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from modeling_k3 import K3Config
from modeling_k3.config_layout import MEANING_OF_ABSENCE, is_released, unwrap, wrap
from tests.unit.helpers import NESTED_CASES, flat_dict, nested_dict

#: What a file means by leaving a field out, besides what is required. Nothing here may silently switch a part on.
ABSENT: dict[str, Any] = {
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "attn_res_block_size": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "latent_moe_use_norm": False,
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "num_expert_group": 1,
    "num_experts": None,
    "num_key_value_heads": 4,
    "num_shared_experts": None,
    "q_lora_rank": None,
    "routed_expert_hidden_size": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
}
#: Fields that do not shape the network; absent they have the default of the class.
HARMLESS: dict[str, Any] = {
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "use_grouped_topk": True,
    "dtype": None,
    "model_type": "k3",
    "architectures": ["K3ForCausalLM"],
}


@pytest.mark.parametrize("name", flat_dict())
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "released"])
def test_a_missing_field_is_an_error_or_has_its_documented_meaning(name: str, nested: bool) -> None:
    source = flat_dict()
    source["linear_attn_config"]["unread"] = 1
    value = source.pop(name)
    given = {"model_type": "kimi_k3", "text_config": source} if nested else source
    if name in ABSENT or name in HARMLESS:
        found = getattr(K3Config.from_dict(given), name)
        assert found == {**ABSENT, **HARMLESS}[name]
        assert name in MEANING_OF_ABSENCE or name in HARMLESS or found == value
    else:
        with pytest.raises(ValueError, match=rf"lacks (.*, )?{name}[,:]"):
            K3Config.from_dict(given)


@pytest.mark.parametrize("name", flat_dict()["linear_attn_config"])
def test_a_missing_entry_of_the_linear_block(name: str) -> None:
    source = flat_dict()
    del source["linear_attn_config"][name]
    if name == "gate_lower_bound":  # absent means the softplus gate
        assert K3Config.from_dict(source).gate_lower_bound is None
    elif name == "use_full_rank_gate":  # absent means low rank
        assert K3Config.from_dict(source).use_full_rank_gate is False
    else:
        with pytest.raises(ValueError, match=rf"lacks linear_attn_config\.{name}"):
            K3Config.from_dict(source)


def test_everything_missing_is_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        K3Config.from_dict({"model_type": "k3", "num_experts": 8, "linear_attn_config": {}})
    for name in ("vocab_size", "kv_lora_rank", "num_experts_per_token", "linear_attn_config.kda_layers"):
        assert name in str(caught.value)


def test_a_file_without_experts_needs_no_fields_about_them() -> None:
    source = {name: value for name, value in flat_dict().items() if "expert" not in name and "moe" not in name}
    assert K3Config.from_dict(source).mlp_layer_types == ["dense"] * 9


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ({"model_type": "llama"}, "model_type='llama'.*k3.*kimi_k3.*kimi_linear"),
        ({**nested_dict(), "model_type": "llava"}, "model_type='llava'"),
        ({**nested_dict(), "text_config": {"model_type": "llama"}}, "text_config.model_type='llama'"),
        ({**nested_dict(), "text_config": None}, "lacks vocab_size"),
        ({}, "lacks vocab_size"),
    ],
)
def test_other_architectures_are_refused(source: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        K3Config.from_dict(source)


# -- the released layout ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", NESTED_CASES)
def test_the_released_layout_comes_back(case: str, tmp_path: Path) -> None:
    """Everything of the wrapper and every entry of the text part, vision and quantisation blocks included.

    `auto_map` is not written: it names code files that are not there. Entries at a library default may be left out.
    """
    source = nested_dict(case)
    config = K3Config.from_dict(source)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved == config.to_released_dict() == config.to_diff_dict()
    assert {k: v for k, v in saved.items() if k != "text_config"} == {
        k: v for k, v in source.items() if k not in ("text_config", "auto_map")
    }
    inner = source["text_config"]
    assert all(saved["text_config"][name] == inner[name] for name in set(inner) & set(saved["text_config"]))
    lost = set(inner) - set(saved["text_config"]) - {"auto_map"}
    defaults = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
    assert all(inner[name] in (None, False, True, 0, defaults.get(name)) for name in lost), lost
    assert not lost & set(K3Config().to_diff_dict())


def test_unknown_entries_survive_at_their_place(tmp_path: Path) -> None:
    source = nested_dict()
    source["extra"], source["text_config"]["extra"] = {"outer": [1, None]}, {"inner": [2, {"x": 0.5}]}
    source["text_config"]["linear_attn_config"]["extra"] = "linear"
    saved = K3Config.from_dict(source).to_released_dict()
    assert saved["extra"] == {"outer": [1, None]} and saved["text_config"]["extra"] == {"inner": [2, {"x": 0.5}]}
    assert saved["text_config"]["linear_attn_config"]["extra"] == "linear"
    flat = {**flat_dict(), "extra": {"flat": 1}}
    K3Config.from_dict(flat).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["extra"] == {"flat": 1}


ROPE = {"head_dim": 8, "rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}


@pytest.mark.parametrize("extra", [{"rope_theta": 10000.0, "rope_scaling": None, "head_dim": 8}, ROPE])
def test_placeholders_for_rotation_stay_aside(extra: dict[str, Any]) -> None:
    """Released files carry them; the library would turn them into a rotary block, which K3 has none of."""
    source = nested_dict()
    source["text_config"] |= extra
    config = K3Config.from_dict(source)
    assert not any(hasattr(config, name) for name in (*extra, "rope_parameters"))
    saved = config.to_released_dict()["text_config"]
    assert all(saved[name] == value for name, value in extra.items()) and "rope_parameters" not in saved
    flat = K3Config.from_dict({**flat_dict(), **extra})
    assert not hasattr(flat, "rope_parameters") and "rope_parameters" not in flat.to_diff_dict()
    assert not hasattr(flat, "head_dim")


def test_generation_parameters_inside_the_text_part_survive() -> None:
    source = nested_dict()
    saved = K3Config.from_dict(source).to_released_dict()["text_config"]
    for name in ("temperature", "top_k", "max_length", "do_sample", "num_beams"):
        assert saved[name] == source["text_config"][name], name


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_the_quantisation_block_stays_where_it_was(place: str) -> None:
    source = nested_dict()
    block = source["text_config"]["quantization_config"]
    if place == "outside":
        source["quantization_config"] = source["text_config"].pop("quantization_config")
    config = K3Config.from_dict(source)
    assert config.quantization_config == block
    saved = config.to_released_dict()
    assert (saved if place == "outside" else saved["text_config"])["quantization_config"] == block
    assert "quantization_config" not in (saved["text_config"] if place == "outside" else saved)
    del config.quantization_config
    saved = config.to_released_dict()
    assert "quantization_config" not in saved and "quantization_config" not in saved["text_config"]


def test_a_changed_field_is_written_at_both_places() -> None:
    source = {**nested_dict(), "vocab_size": 256}
    config = K3Config.from_dict(source)
    config.vocab_size, config.pad_token_id, config.tie_word_embeddings = 320, None, True
    saved = config.to_released_dict()
    for name, value in (("vocab_size", 320), ("pad_token_id", None), ("tie_word_embeddings", True)):
        assert saved[name] == saved["text_config"][name] == value
    assert K3Config.from_dict(saved).pad_token_id is None


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype"])
def test_fields_stated_outside_only_are_found(name: str) -> None:
    source = nested_dict()
    del source["text_config"][name]
    source["tie_word_embeddings"] = True if name == "tie_word_embeddings" else source["tie_word_embeddings"]
    expected = str(source[name])
    assert str(getattr(K3Config.from_dict(source), name)).removeprefix("torch.") == expected


def test_an_untied_model_stays_untied() -> None:
    source = nested_dict()
    del source["tie_word_embeddings"]
    assert K3Config.from_dict(source).tie_word_embeddings is False and K3Config(**source).tie_word_embeddings is False


# Keys of the wrapper that are fields of the class as well reach the constructor as fields.
@pytest.mark.parametrize("name", [name for name in nested_dict() if name != "text_config"])
def test_keywords_read_like_a_dictionary_when_the_wrapper_lacks_an_entry(name: str) -> None:
    source = nested_dict()
    del source[name]
    assert K3Config(**deepcopy(source)) == K3Config.from_dict(source)


@pytest.mark.parametrize(
    "extra",
    [{"pad_token_id": None}, {"transformers_version": "4.56.2"}, {"vocab_size": 256}, {"use_cache": False}],
    ids=lambda extra: next(iter(extra)),
)
def test_keywords_read_like_a_dictionary_when_the_wrapper_states_a_field(extra: dict[str, Any]) -> None:
    source = {**nested_dict(), **extra}
    assert K3Config(**deepcopy(source)) == K3Config.from_dict(source)


def test_a_field_beside_a_nested_config_is_honoured_or_refused() -> None:
    """`K3Config(**released, num_hidden_layers=3)` must not build nine layers in silence."""
    try:
        config = K3Config(**nested_dict(), num_hidden_layers=3)
    except (TypeError, ValueError) as refusal:
        assert "num_hidden_layers" in str(refusal)
    else:
        assert config.num_hidden_layers == 3


def test_leaving_the_released_layout(tmp_path: Path) -> None:
    config = K3Config.from_dict(nested_dict())
    config.released_config = None
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "k3" and "vision_config" not in saved and "text_config" not in saved
    assert K3Config.from_pretrained(tmp_path).layer_types == config.layer_types
    with pytest.raises(ValueError, match="released_config=None"):
        config.to_released_dict()


def test_unwrap_and_wrap_leave_their_arguments_alone() -> None:
    source = nested_dict()
    flat = unwrap(source)
    assert source == nested_dict() and is_released(source) and not is_released(flat)
    kept = deepcopy(flat)
    flat["linear_attn_config"]["kda_layers"].clear()
    assert source == nested_dict()
    flat = deepcopy(kept)
    again = wrap(flat)
    assert flat == kept
    again["vision_config"].clear()
    again["text_config"]["linear_attn_config"].clear()
    assert flat == kept
