"""Presets are found by name, and by name only."""

import json

import pytest

from modeling_k3.configuration import preset_names, preset_path


def test_every_name_leads_to_a_config() -> None:
    for name in preset_names():
        folder = preset_path(name)
        assert folder.is_absolute() and folder.name == name
        assert json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["no-such-preset", "", ".", "../modeling_k3", "tiny/", "/"])
def test_anything_else_is_refused_with_the_names(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        preset_path(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in preset_names())
