"""What is said of an upload: nothing is swallowed."""

from pathlib import Path
from typing import Any

import pytest

from modeling_k3 import K3Tokenizer
from tests.models import build, tiny_config


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"privat": True}, TypeError, "unknown arguments privat; allowed are .*private"),
        ({"license": "mit", "licence": "mit"}, TypeError, "unknown arguments licence, license; allowed are"),
        ({"safe_serialization": False}, ValueError, "safe_serialization=False is not allowed"),
        ({"distributed_checkpoint": True}, ValueError, "distributed_checkpoint=True is for resuming"),
    ],
)
def test_nothing_that_is_said_is_swallowed(
    options: dict[str, Any], error: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typing error in `private` must not make a public repository."""
    made: list[str] = []
    monkeypatch.setattr("modeling_k3.hub_upload.HfApi.create_repo", lambda _, name, **options: made.append(name))
    model = build(tiny_config("M", num_experts=None))
    if not {"privat", "license"} & set(options):
        with pytest.raises(error, match=says):
            model.save_pretrained(tmp_path / "x", push_to_hub=True, **options)
    else:
        says = says.replace(".*private", "")
        with pytest.raises(error, match=says):
            model.save_pretrained(tmp_path / "x", **options)
        with pytest.raises(error, match=says):
            K3Tokenizer.byte_level().push_to_hub("me/my-k3", **options)
    with pytest.raises(error, match=says.replace(".*private", "")):
        model.push_to_hub("me/my-k3", **options)
    assert not made and not (tmp_path / "x").exists()
    # What accelerate's loops and older scripts say.
    model.save_pretrained(tmp_path / "x", safe_serialization=True, save_function=print)
    assert (tmp_path / "x" / "model.safetensors").is_file()
