"""The form of KDA is chosen when loading, like an attention implementation, and is not saved."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from modeling_k3 import K3ForCausalLM
from tests.models import build, tiny_config


def implementations(model: K3ForCausalLM) -> set[str]:
    return {layer.self_attn.implementation for layer in model.model.layers if layer.is_linear}


@pytest.mark.parametrize("loader", [K3ForCausalLM, AutoModelForCausalLM])
def test_loading_takes_the_choice_and_saving_leaves_it_out(loader: type, tmp_path: Path) -> None:
    build(tiny_config()).save_pretrained(tmp_path / "a")
    model = loader.from_pretrained(tmp_path / "a", kda_implementation="exact")
    assert implementations(model) == {"exact"}
    model.save_pretrained(tmp_path / "b")
    assert "kda_implementation" not in (tmp_path / "b" / "config.json").read_text()
    assert implementations(loader.from_pretrained(tmp_path / "b")) == {"auto"}
    loaded, info = loader.from_pretrained(tmp_path / "a", kda_implementation="chunk", output_loading_info=True)
    assert implementations(loaded) == {"chunk"} and not info["missing_keys"]


def test_an_unknown_choice_is_refused_before_loading() -> None:
    with pytest.raises(ValueError, match="kda_implementation='fast' is unknown"):
        K3ForCausalLM.from_pretrained("nowhere", kda_implementation="fast")
