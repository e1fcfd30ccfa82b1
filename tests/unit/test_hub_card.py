"""Model cards: metadata that the hub can read, the licence that binds, and nothing that was not counted or said."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from modeling_k3 import K3Config, K3ForCausalLM, K3ForSequenceClassification, K3Model
from modeling_k3.configuration import preset_path
from modeling_k3.hub_card import _RELEASED_WIDTHS, check_card, is_derived, make_card
from modeling_k3.hub_code import auto_class_of
from modeling_k3.hub_facts import active_parameters, describe
from tests.checkpoints import released
from tests.layout_source import ROOT
from tests.models import build, tiny_config


def card_of(model: Any, **card: Any) -> tuple[dict[str, Any], str]:
    """Metadata and text of a card."""
    derived = card.get("derived", False)
    text = make_card(model, "me/my-k3", auto_class_of(model), check_card(card), derived)
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_a_model_of_ones_own() -> None:
    model = build(tiny_config())
    data, body = card_of(model, title="Mine", license="mit", base_model="a/b", datasets=["x/y"], tags=["tiny", "k3"])
    assert data == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "mit",
        "base_model": "a/b",
        "datasets": ["x/y"],
        "tags": ["k3", "linear-attention", "mixture-of-experts", "tiny"],
    }
    assert body.startswith("\n# Mine\n") and "The weights are under mit." in body and "Apache-2.0" in body
    assert "Moonshot" not in body
    assert 'AutoModelForCausalLM.from_pretrained("me/my-k3", trust_remote_code=True)' in body
    assert all(word in body for word in ("LoRA on packed experts", "k3 chat")) and "kernels" not in body


def test_what_nobody_said_is_not_claimed() -> None:
    data, body = card_of(build(tiny_config()))
    assert data["license"] == "other" and "not-stated" in data["license_name"] and "base_model" not in data
    assert "has not stated a licence" in body and "No other figures were given" in body


def test_derived_weights_carry_the_licence_that_binds() -> None:
    """Name, notice duty, both commercial clauses and what is exempt, as the licence of the release has them."""
    data, body = card_of(build(tiny_config()), derived=True)
    assert (data["license"], data["license_name"]) == ("other", "kimi-k3")
    assert data["license_link"].endswith("Kimi-K3/blob/main/LICENSE") and data["base_model"] == "moonshotai/Kimi-K3"
    flat = " ".join(body.split())
    for clause in (
        "copyright line and permission notice go with every copy or substantial portion",
        "total revenue exceeds 20 million US dollars over any 12 consecutive months",
        "needs a separate agreement with Moonshot AI before any commercial use",
        "more than 100 million monthly active users or more than 20 million US dollars monthly revenue",
        'must show "Kimi K3" prominently',
        "Internal use that lets nothing of the model, its outputs or its capabilities reach third parties",
        "`*.py`) are under [Apache-2.0]",
    ):
        assert clause in flat
    with pytest.raises(ValueError, match="license='mit', but the weights derive from moonshotai/Kimi-K3"):
        card_of(build(tiny_config()), derived=True, license="mit")


@pytest.mark.parametrize(
    ("name", "derived"),
    [
        ("moonshotai/Kimi-K3", True),
        ("somewhere/kimi-k3-merged", True),
        ("me/kimi_k3", True),
        ("me/my-k3", False),
        ("moonshotai/Kimi-K30", False),
        ("/home/me/Kimi-K3.bf16/", True),
        ("/home/me/kimi-k3/runs/pico", False),
        ("kimi-k3/pico", False),
        ("", False),
    ],
)
def test_known_by_its_name(name: str, derived: bool) -> None:
    model = build(tiny_config("M", num_experts=None))
    model.name_or_path = name
    assert is_derived(model, None) is derived


def test_known_by_its_widths() -> None:
    config = K3Config.from_pretrained(preset_path("kimi-k3"))
    assert all(getattr(config, name) == width for name, width in _RELEASED_WIDTHS.items())
    assert is_derived(SimpleNamespace(config=config), None)
    config.num_hidden_layers = 3
    assert is_derived(SimpleNamespace(config=config), None)
    assert not is_derived(SimpleNamespace(config=K3Config.from_pretrained(preset_path("small"))), None)


@pytest.mark.parametrize(
    ("file", "text"),
    [("LICENSE", "Kimi K3 License\n\nCopyright ..."), ("README.md", "---\nlicense_name: kimi-k3\n---")],
)
def test_known_by_what_lies_beside_it(file: str, text: str, tmp_path: Path) -> None:
    model = build(tiny_config("M", num_experts=None))
    assert not is_derived(model, tmp_path)
    (tmp_path / file).write_text(text)
    assert is_derived(model, tmp_path)


def test_the_licence_goes_along_or_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build(tiny_config("M", num_experts=None))
    model.save_pretrained(tmp_path / "kimi-k3")
    for name in ("LICENSE", "THIRD_PARTY_NOTICES.md", "notes.txt"):
        (tmp_path / "kimi-k3" / name).write_text(f"Kimi K3 License: {name}")
    loaded = K3ForCausalLM.from_pretrained(tmp_path / "kimi-k3")
    loaded.save_pretrained(tmp_path / "with", with_code=True)
    assert (tmp_path / "with" / "LICENSE").read_text() == "Kimi K3 License: LICENSE"
    assert (tmp_path / "with" / "THIRD_PARTY_NOTICES.md").is_file() and not (tmp_path / "with" / "notes.txt").exists()
    # The next one on is known by what lies beside it, whatever it is called.
    again = K3ForCausalLM.from_pretrained(tmp_path / "with")
    again.save_pretrained(tmp_path / "next", with_code=True)
    assert "license_name: kimi-k3" in (tmp_path / "next" / "README.md").read_text()
    (tmp_path / "with" / "LICENSE").unlink()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    own = logging.getLogger("modeling_k3.hub_code")
    own.addHandler(caplog.handler)
    try:
        again.save_pretrained(tmp_path / "without", with_code=True)
    finally:
        logger.removeHandler(caplog.handler)
        own.removeHandler(caplog.handler)
    assert "no LICENSE file was found" in caplog.text


@pytest.mark.parametrize(
    ("card", "says"),
    [
        ({"licence": "mit"}, r"unknown entries \['licence'\]; allowed are"),
        ({"figures": [{"what": "loss"}]}, "needs 'what' and 'value'"),
        ({"figures": [{"what": "loss", "value": 1, "when": "now"}]}, "allowed are"),
    ],
)
def test_wrong_entries(card: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        build(tiny_config("M", num_experts=None)).save_pretrained(tmp_path / "x", with_code=True, card=card)
    assert not (tmp_path / "x").exists()
    with pytest.raises(TypeError, match="must be a dictionary"):
        check_card("mit")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("card", "says"),
    [
        ({"license": 3}, r"card: license=3; allowed is a text$"),
        ({"title": ["x"]}, r"card: title=\['x'\]; allowed is a text$"),
        ({"description": b"x"}, r"card: description=b'x'; allowed is a text$"),
        ({"base_model": [1]}, r"card: base_model=\[1\]; allowed is a text or a list of texts$"),
        ({"datasets": {"x": 1}}, r"card: datasets=\{'x': 1\}; allowed is a text or a list of texts$"),
        ({"language": 1}, r"card: language=1; allowed is a text or a list of texts$"),
        ({"tags": "tiny"}, r"card: tags='tiny'; allowed is a list of texts$"),
        ({"derived": "no"}, r"card: derived='no'; allowed is True, False, or None"),
        ({"figures": {"what": 1}}, r"card: figures=\{'what': 1\}; allowed is a list of dictionaries$"),
        ({"figures": [3]}, r"card: figures=\[3\]; allowed is a list of dictionaries$"),
        ({"figures": [{"what": "x", "value": [1]}]}, r"card: figures: value=\[1\]; allowed is a text, a number"),
        ({"figures": [{"what": "x", "value": True}]}, r"card: figures: value=True; allowed is a text, a number"),
    ],
)
def test_wrong_types(card: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=says):
        build(tiny_config("M", num_experts=None)).save_pretrained(tmp_path / "x", with_code=True, card=card)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("options", [{}, {"save_original_format": False}], ids=["ours", "library"])
def test_nothing_is_made_for_a_card_that_cannot_be(options: dict[str, Any], tmp_path: Path) -> None:
    """Whoever writes the files: a licence that does not bind, a tokenizer whose code does not go along."""
    model = build(tiny_config())
    with pytest.raises(ValueError, match="license='mit', but the weights derive"):
        model.save_pretrained(tmp_path / "x", with_code=True, card={"derived": True, "license": "mit"}, **options)
    with pytest.raises(TypeError, match="tokenizer is a str; allowed is a K3Tokenizer, or None"):
        model.save_pretrained(tmp_path / "x", with_code=True, tokenizer="bytes", **options)
    assert not (tmp_path / "x").exists()


def test_what_is_none_is_not_said(tmp_path: Path) -> None:
    said = check_card({"license": None, "tags": None, "derived": None, "language": ["en", "de"], "base_model": ["a/b"]})
    assert said == {"language": ["en", "de"], "base_model": ["a/b"]}
    data, body = card_of(build(tiny_config("M", num_experts=None)), **{**said, "base_model": ["a/b", "c/d"]})
    assert data["language"] == ["en", "de"] and data["base_model"] == ["a/b", "c/d"]
    assert "Derived from a/b, c/d." in body


def test_a_licence_that_does_not_bind_is_refused_before_the_repository_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("modeling_k3.hub_upload.HfApi.create_repo", lambda _, name, **options: made.append(name))
    with pytest.raises(ValueError, match="license='mit', but the weights derive from moonshotai/Kimi-K3"):
        build(tiny_config()).push_to_hub("me/my-k3", card={"derived": True, "license": "mit"})
    with pytest.raises(TypeError, match=r"card: tags='tiny'; allowed is a list of texts"):
        build(tiny_config()).push_to_hub("me/my-k3", tags="tiny")
    with pytest.raises(TypeError, match="tokenizer is a str; allowed is a K3Tokenizer"):
        build(tiny_config()).push_to_hub("me/my-k3", tokenizer="bytes")
    assert not made


def test_figures_are_a_table() -> None:
    figure = {"what": "bits per byte", "value": 1.74, "command": "k3 demo | tee", "machine": "2 cores", "date": "2026"}
    _, body = card_of(build(tiny_config("M", num_experts=None)), figures=[figure, {"what": "loss", "value": 2}])
    assert "| what | value | command | machine | date |" in body
    assert "| bits per byte | 1.74 | k3 demo \\| tee | 2 cores | 2026 |" in body and "| loss | 2 |  |  |  |" in body


def test_metadata_cannot_be_broken_out_of() -> None:
    data, _ = card_of(build(tiny_config("M", num_experts=None)), license="mit\nevil: true", base_model="a: b # c")
    assert data["license"] == "mit\nevil: true" and data["base_model"] == "a: b # c" and "evil" not in data


def test_counts() -> None:
    """Against a count by hand: an expert that is not chosen does not work."""
    config = tiny_config()
    model = build(config)
    moe = config.mlp_layer_types.count("sparse")
    one = 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
    idle = moe * one * (config.num_experts - config.num_experts_per_token)
    assert active_parameters(model) == sum(p.numel() for p in model.parameters()) - idle
    rows = dict(describe(model))
    assert rows["layers"] == "5: 3 KDA, 2 MLA" and rows["format"] == "float32"
    assert rows["experts"] == "8 in each of 4 layers, 2 chosen per token, 2 shared; width 32"
    dense = dict(describe(build(tiny_config("M", num_experts=None))))
    assert "experts" not in dense
    packed = dict(describe(K3ForCausalLM.from_pretrained(released(), dtype="auto")))
    assert packed["format"] == "routed experts MXFP4, the rest bfloat16"


def test_heads() -> None:
    decoder = K3Model(tiny_config("M", num_experts=None))
    data, body = card_of(decoder)
    assert "pipeline_tag" not in data and "import AutoModel, AutoTokenizer" in body
    data, body = card_of(K3ForSequenceClassification(tiny_config("M", num_experts=None)))
    assert data["pipeline_tag"] == "text-classification" and "AutoModelForSequenceClassification" in body


def test_card_and_notice_say_the_same_of_the_licence() -> None:
    """Whom the commercial clauses bind, and whom they spare."""
    _, body = card_of(build(tiny_config("M", num_experts=None)), derived=True)
    texts = [" ".join(text.split()) for text in (body, (ROOT / "NOTICE").read_text(encoding="utf-8"))]
    clauses = [text[text.index("- Model as a service") : text.index("from the last two points.")] for text in texts]
    assert clauses[0] == clauses[1]
    for spared in ("End-user products that embed the model", "mere relaying", "its outputs or its capabilities reach"):
        assert spared in clauses[0]


def test_a_licence_of_ones_own() -> None:
    said = {"license_name": "mine", "license_link": "https://example.org/mine"}
    data, body = card_of(build(tiny_config("M", num_experts=None)), **said)
    assert {"license": "other", **said}.items() <= data.items() and "The weights are under mine." in body
    with pytest.raises(ValueError, match="license='mine', but the weights derive"):
        card_of(build(tiny_config("M", num_experts=None)), derived=True, **said)
