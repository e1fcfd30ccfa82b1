"""The library's Auto classes know K3, also where somebody was there first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

import modeling_k3
from modeling_k3 import K3Config, K3ForCausalLM
from tests.models import tiny_config
from tests.unit.helpers import GOLDEN, flat_dict

ROOT = Path(modeling_k3.__file__).resolve().parents[1]

#: Another package, and the library itself, already have the names; then ours is imported, twice.
SOMEBODY_ELSE = """
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto

class Other(PreTrainedConfig):
    model_type = "kimi_k3"

class Flat(PreTrainedConfig):
    model_type = "k3"

class OtherModel(PreTrainedModel):
    config_class = Other

AutoConfig.register("kimi_k3", Other)
AutoConfig.register("k3", Flat)
AutoModelForCausalLM.register(Other, OtherModel)
configuration_auto.CONFIG_MAPPING_NAMES["kimi_k3"] = "BertConfig"
CONFIG_MAPPING._mapping["kimi_k3"] = "BertConfig"
CONFIG_MAPPING._mapping["k3"] = "BertConfig"

import modeling_k3
modeling_k3.register()
released = AutoConfig.from_pretrained(RELEASED)
flat = AutoConfig.for_model("k3", num_hidden_layers=2)
assert type(released) is type(flat) is modeling_k3.K3Config, (type(released), type(flat))
model = AutoModelForCausalLM.from_config(flat)
assert type(model) is modeling_k3.K3ForCausalLM, type(model)
print("registered", released.num_hidden_layers, model.config.num_hidden_layers)
"""


@pytest.mark.parametrize("name", ["k3", "kimi_k3"])
def test_both_types_lead_to_our_config(name: str) -> None:
    assert CONFIG_MAPPING[name] is K3Config and type(AutoConfig.for_model(name)) is K3Config


@pytest.mark.parametrize(
    "auto",
    [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification],
    ids=lambda auto: auto.__name__,
)
def test_every_auto_class_builds_ours(auto: type) -> None:
    names = {
        "AutoModel": "K3Model",
        "AutoModelForCausalLM": "K3ForCausalLM",
        "AutoModelForSequenceClassification": "K3ForSequenceClassification",
        "AutoModelForTokenClassification": "K3ForTokenClassification",
    }
    assert type(auto.from_config(tiny_config("M", num_experts=None))).__name__ == names[auto.__name__]


def test_registering_again_changes_nothing() -> None:
    modeling_k3.register()
    modeling_k3.register()
    assert CONFIG_MAPPING["k3"] is K3Config and AutoModelForCausalLM._model_mapping[K3Config] is K3ForCausalLM


def test_the_community_type_is_left_to_the_library() -> None:
    """A plain Kimi Linear file keeps its own class with AutoConfig; K3Config reads it when asked to."""
    assert CONFIG_MAPPING["kimi_linear"] is not K3Config
    assert K3Config.from_dict(flat_dict("kimi_linear_like")).model_type == "k3"


def test_names_that_are_taken_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(PreTrainedConfig):
        model_type = "kimi_k3"

    models = AutoModelForCausalLM._model_mapping
    monkeypatch.setattr(CONFIG_MAPPING, "_mapping", {**CONFIG_MAPPING._mapping, "kimi_k3": "BertConfig"})
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {"kimi_k3": Other, "k3": Other})
    monkeypatch.setattr(models, "_extra_content", {**models._extra_content, Other: PreTrainedModel, K3Config: object})
    modeling_k3.register()
    assert CONFIG_MAPPING["k3"] is CONFIG_MAPPING["kimi_k3"] is K3Config
    assert models[K3Config] is K3ForCausalLM and models[Other] is PreTrainedModel


@pytest.mark.slow
def test_importing_after_somebody_else_registered() -> None:
    """The same from the very beginning, in a process of its own."""
    released = str(GOLDEN / "mxfp4_release" / "checkpoint")
    code = f"RELEASED = {released!r}\n{SOMEBODY_ELSE}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "registered 9 2"
