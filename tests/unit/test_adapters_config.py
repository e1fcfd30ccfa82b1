"""Presets, plans and refusals: what is adapted is named exactly, and nothing that is asked for is ignored."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BdLoraConfig, LoraConfig, get_peft_model
from torch import nn

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.adapters import PRESETS, K3ExpertsLora, K3LoraModel, k3_lora, lora_config, plan_lora
from modeling_k3.configuration import preset_path
from tests.loras import load
from tests.models import build, tiny_config, variant


@pytest.fixture
def tiny() -> K3ForCausalLM:
    return build(tiny_config())


def adapted(model: nn.Module) -> set[str]:
    """Names of adapted modules."""
    found = {n for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}
    return {name.removeprefix("base_model.model.") for name in found}


def linear_modules(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is nn.Linear}


def expected_of(preset: str, model: nn.Module) -> set[str]:
    """From the parts of the model, not from the endings of names."""
    found: set[str] = set()
    for name, layer in ((f"model.layers.{i}", layer) for i, layer in enumerate(model.model.layers)):
        parts: dict[str, list[str]] = {"attention": [f"{name}.self_attn.{n}" for n in linear_modules(layer.self_attn)]}
        if hasattr(layer, "block_sparse_moe"):
            moe = f"{name}.block_sparse_moe"
            parts["latent"] = [f"{moe}.routed_expert_down_proj", f"{moe}.routed_expert_up_proj"]
            parts["shared"] = [f"{moe}.shared_experts.{n}" for n in ("gate_proj", "up_proj", "down_proj")]
            parts["experts"] = [f"{moe}.experts"]
        else:
            parts["dense"] = [f"{name}.mlp.{n}" for n in ("gate_proj", "up_proj", "down_proj")]
        found |= {n for kind, names in parts.items() for n in names if preset in (kind, "all")}
    return found


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("kind", ["tiny", "no_q_lora", "low_rank_gate"])
def test_a_preset_adapts_exactly_its_part(preset: str, kind: str) -> None:
    model = build(variant(kind))
    expected = expected_of(preset, model)
    assert adapted(get_peft_model(model, lora_config(preset, r=2))) == expected and expected


def test_all_linear_catches_linear_layers_and_nothing_else(tiny: K3ForCausalLM) -> None:
    expected = linear_modules(tiny) - {"lm_head"}
    found = adapted(get_peft_model(tiny, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")))
    assert found == expected == expected_of("all", tiny_twin()) - expected_of("experts", tiny_twin())
    assert not any(word in name for name in found for word in ("gate.", "res_proj", "norm", "conv", "lm_head", "embed"))


def tiny_twin() -> K3ForCausalLM:
    return build(tiny_config())


@pytest.mark.parametrize("preset", list(PRESETS))
def test_the_plan_is_what_is_trained(preset: str, tiny: K3ForCausalLM) -> None:
    lora = lora_config(preset, r=3, matrices=("w1", "w2"), expert_r=2) if preset in ("experts", "all") else None
    lora = lora or lora_config(preset, r=3, modules_to_save=["lm_head"])
    plan, again = plan_lora(tiny, lora), plan_lora(tiny.config, lora)
    model = get_peft_model(tiny, lora)
    assert plan == again and plan.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert set(plan.targets) - {"lm_head"} == adapted(model)
    assert f"{plan.trainable:,}" in str(plan)


def test_the_release_is_planned_without_memory() -> None:
    """An adapter of 26 GB for 2.78 T parameters, counted in a second or two."""
    started = time.perf_counter()
    config = K3Config.from_pretrained(preset_path("kimi-k3"))
    plan = plan_lora(config, lora_config("experts", r=4))
    layers = config.num_hidden_layers - config.first_k_dense_replace
    e, f = config.routed_expert_hidden_size, config.moe_intermediate_size
    assert plan.trainable == layers * config.num_experts * 4 * 3 * (e + f)
    assert plan.total > 2.7e12 and plan.trainable * 4 > 2**34
    assert time.perf_counter() - started < 30


def test_k3_lora_prints_before_it_allocates(tiny: K3ForCausalLM, capsys: pytest.CaptureFixture[str]) -> None:
    model = k3_lora(tiny, ["latent", "experts"], r=2, adapter_name="mine")
    printed = capsys.readouterr().out
    assert "block_sparse_moe.experts" in printed and "routed_expert_up_proj" in printed
    assert f"trainable: {model.get_nb_trainable_parameters()[0]:,}" in printed
    assert list(model.peft_config) == ["mine"]


def test_the_scaling_of_experts_of_another_rank_stays() -> None:
    model = get_peft_model(build(tiny_config()), lora_config("experts", r=8, lora_alpha=4, expert_r=2))
    layer = next(m for m in model.modules() if isinstance(m, K3ExpertsLora))
    assert {term.scaling for term in layer._terms()[0]} == {0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "router"}, "preset='router' is unknown"),
        ({"preset": []}, "allowed matrices"),
        ({"preset": "experts", "matrices": ("w4",)}, "allowed matrices"),
        ({"preset": "attention", "matrices": ("w1",)}, "are about experts"),
        ({"preset": "attention", "expert_r": 2}, "are about experts"),
        ({"preset": "all", "r": 0}, "r=0 is no rank"),
    ],
)
def test_presets_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lora_config(**arguments)


#: Options that stacked experts cannot honour, each with a value that asks for it.
REFUSED: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "init_lora_weights_olora": {"init_lora_weights": "olora"},
    "use_qalora": {"use_qalora": True},
    "use_bdlora": {"use_bdlora": BdLoraConfig(nblocks=2)},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1, 2]},
    "rank_pattern": {"rank_pattern": {"experts.3.w1": 2}},
    "alpha_pattern": {"alpha_pattern": {r"experts\.\d+\.w1": 2}},
    "layer_replication": {"layer_replication": [[0, 2], [1, 3]]},
    "bias": {"bias": "all"},
    "target_parameters": {"target_parameters": ["experts.middle_proj"]},
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_options_that_cannot_be_honoured_are_refused_before_anything_changes(case: str, tiny: K3ForCausalLM) -> None:
    names = [name for name, _ in tiny.named_modules()]
    with pytest.raises(ValueError, match=case.removesuffix("_olora")):
        get_peft_model(tiny, LoraConfig(target_modules=["q_proj", "experts"], **REFUSED[case]))
    assert [name for name, _ in tiny.named_modules()] == names


def test_every_option_of_this_peft_is_honoured_or_refused() -> None:
    """A new release of peft with a new option makes this fail, and someone decide."""
    from modeling_k3.adapters import expert_config as checked

    known = checked._KNOWN | set(checked._NEUTRAL)
    assert {name for name in vars(LoraConfig()) if not name.startswith("_")} - known == set()


def test_dora_and_pissa_elsewhere_are_peft_s_business(tiny: K3ForCausalLM) -> None:
    model = get_peft_model(tiny, lora_config("attention", r=2, use_dora=True))
    assert any("magnitude" in name for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["a.b", ""])
def test_adapter_names_with_dots_are_refused(name: str, tiny: K3ForCausalLM) -> None:
    with pytest.raises(ValueError, match="adapter_name"):
        get_peft_model(tiny, lora_config("latent"), adapter_name=name)


@pytest.mark.parametrize("target", ["gate", "self_attention_res_proj", "q_conv1d", "input_layernorm"])
def test_what_is_no_linear_layer_is_refused_by_name(target: str, tiny: K3ForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"not supported|not found"):
        get_peft_model(tiny, LoraConfig(target_modules=[target]))


@pytest.mark.parametrize("storage", ["packed", "mapped"])
def test_packed_bytes_are_no_parameters_to_adapt(storage: str) -> None:
    model = load(storage)
    for name in ("experts.down_proj", "experts.down_proj_packed"):
        with pytest.raises(ValueError, match="use target_modules=\\['experts'\\]"):
            get_peft_model(model, LoraConfig(target_modules=["q_proj"], target_parameters=[name]))
    with pytest.raises(ValueError, match="modules_to_save has 'experts'"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]))
    assert not adapted(model)


@pytest.mark.parametrize(
    "options",
    [{"exclude_modules": ["layers.1.block_sparse_moe.experts"]}, {"layers_to_transform": [2, 3]}],
    ids=["exclude", "layers"],
)
def test_choices_of_layers_hold_for_experts(options: dict[str, Any], tiny: K3ForCausalLM) -> None:
    found = adapted(get_peft_model(tiny, lora_config("experts", r=2, **options)))
    wanted = {1, 2, 3, 4} - {1} if "exclude_modules" in options else {2, 3}
    assert found == {f"model.layers.{i}.block_sparse_moe.experts" for i in wanted}


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_starting_values(init: bool | str, tiny: K3ForCausalLM) -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny, lora_config("experts", r=8, init_lora_weights=init))
    layer = next(m for m in model.modules() if isinstance(m, K3ExpertsLora))
    a, b = layer.lora_A["default"].w2, layer.lora_B["default"].w2
    assert a.std().item() == pytest.approx(1 / 8 if init == "gaussian" else (3 * 64) ** -0.5, rel=0.05)
    assert bool(b.any()) == (init is False)


def test_other_models_are_left_to_peft() -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    model = get_peft_model(plain, LoraConfig(target_modules=["0"], bias="all"))
    assert isinstance(model.base_model, K3LoraModel) and model.base_model.model[0].lora_A["default"].weight.shape == (
        8,
        4,
    )


def test_the_config_survives_json(tmp_path: Path) -> None:
    lora_config("all", r=4, matrices=("w1",), expert_r=2).save_pretrained(tmp_path)
    again = LoraConfig.from_pretrained(tmp_path)
    assert again.rank_pattern == {"experts.w3": 0, "experts.w2": 0, "experts": 2}
    assert set(again.target_modules) == set(PRESETS["all"])
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
