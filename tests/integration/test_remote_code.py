"""What is uploaded works where this package is not, and keeps out of its way beside it."""

import getpass
import json
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from modeling_k3 import K3ForCausalLM, K3ForSequenceClassification, K3Tokenizer
from modeling_k3.class_maps import LABEL
from tests.checkpoints import read_directory, released
from tests.layout_source import ROOT
from tests.models import build, tiny_config
from tests.uploads import BLOCKED, USE, ask, check_answer, needed_files, own_entries, run


def test_an_upload_holds_these_files_and_no_other(uploaded: Path) -> None:
    side = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    side |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in uploaded.iterdir()} == needed_files() | side
    for name in needed_files():
        labelled = LABEL + (ROOT / "modeling_k3" / name).read_text(encoding="utf-8")
        assert (uploaded / name).read_text(encoding="utf-8") == labelled, name
    config = json.loads((uploaded / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_k3.K3Config",
        "AutoModel": "modeling_k3.K3Model",
        "AutoModelForCausalLM": "modeling_k3.K3ForCausalLM",
        "AutoTokenizer": ["tokenization_k3.K3Tokenizer", None],
    }
    tokenizer = json.loads((uploaded / "tokenizer_config.json").read_text())
    assert tokenizer["auto_map"] == {"AutoTokenizer": ["tokenization_k3.K3Tokenizer", None]}
    assert json.loads((uploaded / "generation_config.json").read_text())["eos_token_id"] == [258, 257]


def test_a_plain_save_holds_no_code_and_no_class_map(uploaded: Path, tmp_path: Path) -> None:
    K3ForCausalLM.from_pretrained(uploaded).save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match="with_code=True"):
        build(tiny_config()).save_pretrained(tmp_path, card={"title": "x"})


def test_nothing_of_this_machine_is_uploaded(uploaded: Path) -> None:
    words = [str(ROOT), str(uploaded), str(uploaded.parent), str(Path.home()), sys.prefix, f"/{getpass.getuser()}/"]
    for path in uploaded.iterdir():
        content = path.read_bytes()
        assert not [word for word in words if word != "/" and word.encode() in content], path.name


def test_it_works_where_the_package_is_not(byte_model: K3ForCausalLM, uploaded: Path, tmp_path: Path) -> None:
    results, copy, home = ask(tmp_path), tmp_path / "copy", tmp_path / "home"
    home.mkdir()
    said = run(BLOCKED + USE, str(uploaded), results, str(copy), home=home, HF_HUB_OFFLINE="1")
    assert said == "['dense'] K3Tokenizer [100, 101, 102, 32, 120] [258, 257]"
    check_answer(results, byte_model)
    # What it saved there is the same again, code included; the card is made anew.
    assert {p.name for p in copy.iterdir()} == {p.name for p in uploaded.iterdir()}
    different = {p.name for p in uploaded.iterdir() if p.read_bytes() != (copy / p.name).read_bytes()}
    assert different <= {"README.md", "config.json", "generation_config.json", "tokenizer_config.json"}
    assert own_entries((copy / "tokenizer_config.json").read_text()) == own_entries(
        (uploaded / "tokenizer_config.json").read_text()
    )
    first, again = (json.loads((f / "config.json").read_text())["auto_map"] for f in (uploaded, copy))
    assert again == first
    assert json.loads((copy / "generation_config.json").read_text())["eos_token_id"] == [258, 257]


def test_the_class_map_is_whole_in_either_order(byte_model: K3ForCausalLM, tmp_path: Path) -> None:
    """Model and tokenizer are saved one by one, as Trainer does it; what is not there is not named."""
    tokenizer, maps = K3Tokenizer.byte_level(), []
    for order in ("model", "model tokenizer", "tokenizer model", "tokenizer model model"):
        folder = tmp_path / order.replace(" ", "-")
        for part in order.split():
            (byte_model if part == "model" else tokenizer).save_pretrained(folder, with_code=True)
        maps.append(json.loads((folder / "config.json").read_text())["auto_map"])
    assert "AutoTokenizer" not in maps[0]
    named = {**maps[0], "AutoTokenizer": ["tokenization_k3.K3Tokenizer", None]}
    assert maps[1:] == [named, named, named]
    tokenizer.save_pretrained(tmp_path / "model", with_code=False)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["auto_map"] == maps[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('fake("transformers", "4.57.1")', "needs transformers>=5.24,<5.25 and found transformers 4.57.1: pip install"),
        ('fake("torch", "2.9.1")', "needs torch>=2.13 and found torch 2.9.1: pip install"),
        ("sys.version_info = (3, 10, 14)", "needs Python 3.11 or newer and runs in 3.10.14"),
    ],
)
def test_other_versions_are_named_there_too(uploaded: Path, tmp_path: Path, change: str, says: str) -> None:
    """By whatever an upload is entered, before anything of it is imported that another version may lack."""
    code = f"""
        import importlib.metadata, sys
        import transformers.configuration_utils
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
        from transformers.dynamic_module_utils import get_class_from_dynamic_module
        own = importlib.metadata.version
        def fake(package, version):
            importlib.metadata.version = lambda name: version if name == package else own(name)
        {change}
        # As an older transformers, which has not got this name.
        del transformers.configuration_utils.PreTrainedConfig
        for auto in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
            try:
                auto.from_pretrained(sys.argv[1], trust_remote_code=True)
            except ImportError as error:
                print(error)
        # As for a tokenizer by itself, whose folder has no config.
        try:
            get_class_from_dynamic_module("tokenization_k3.K3Tokenizer", sys.argv[1])
        except ImportError as error:
            print(error)
    """
    said = run(BLOCKED + textwrap.dedent(code), str(uploaded), home=tmp_path, HF_HUB_OFFLINE="1").splitlines()
    assert len(said) == 4 and all(line.startswith(f"modeling_k3 {says}") for line in said), said


def test_packed_experts_stay_packed_there(tmp_path: Path) -> None:
    """A release with code beside it: packed in a process without the package, and byte for byte the same after."""
    model = K3ForCausalLM.from_pretrained(released(), dtype="auto")
    model.save_pretrained(tmp_path / "upload", with_code=True)
    config = json.loads((tmp_path / "upload" / "config.json").read_text())
    assert config["model_type"] == "kimi_k3" and config["auto_map"]["AutoConfig"] == "configuration_k3.K3Config"
    results, copy, home = ask(tmp_path), tmp_path / "copy", tmp_path / "home"
    home.mkdir()
    said = run(BLOCKED + USE, str(tmp_path / "upload"), results, str(copy), home=home, HF_HUB_OFFLINE="1")
    assert said == "['packed'] no tokenizer"
    check_answer(results, model)
    source = read_directory(tmp_path / "upload")
    assert read_directory(copy) == source


def test_a_classifier_takes_its_file_along(tmp_path: Path) -> None:
    model = build(tiny_config("KM", num_experts=None, num_labels=3), model_class=K3ForSequenceClassification)
    model.save_pretrained(tmp_path / "upload", with_code=True)
    found = json.loads((tmp_path / "upload" / "config.json").read_text())["auto_map"]
    assert found["AutoModelForSequenceClassification"] == "classification.K3ForSequenceClassification"
    card = (tmp_path / "upload" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "AutoModelForSequenceClassification" in card
    code = """
        import sys, torch
        from transformers import AutoModelForSequenceClassification as Auto
        print(Auto.from_pretrained(sys.argv[1], trust_remote_code=True)(torch.tensor([[1, 2]])).logits.shape)
    """
    (tmp_path / "home").mkdir()
    said = run(BLOCKED + textwrap.dedent(code), str(tmp_path / "upload"), home=tmp_path / "home", HF_HUB_OFFLINE="1")
    assert said == "torch.Size([1, 3])"


def test_a_registered_class_carries_its_code_on_every_save(
    byte_model: K3ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Trainer needs, which saves and uploads by itself."""
    monkeypatch.setattr(K3ForCausalLM, "_auto_class", None)
    K3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    byte_model.save_pretrained(tmp_path / "a")
    assert (tmp_path / "a" / "modeling_k3.py").is_file()
    assert "AutoModel" in json.loads((tmp_path / "a" / "config.json").read_text())["auto_map"]
    byte_model.save_pretrained(tmp_path / "b", with_code=False)
    assert not (tmp_path / "b" / "modeling_k3.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "b" / "config.json").read_text())


# -- beside the package -----------------------------------------------------------------------------------------


def test_installed_code_wins(uploaded: Path, tmp_path: Path) -> None:
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import modeling_k3
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
        for trust in (None, True):
            options = {} if trust is None else {"trust_remote_code": trust}
            for auto in (AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer):
                assert type(auto.from_pretrained(sys.argv[2], **options)).__module__.startswith("modeling_k3."), auto
        print("local")
    """
    assert run(code, str(ROOT), str(uploaded), home=tmp_path, HF_HUB_OFFLINE="1") == "local"


def test_two_copies_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The copy is loaded between two loads of the package, and the other way round, and a second repository beside
    it: all packed, all equal.
    """
    K3ForCausalLM.from_pretrained(released(), dtype="auto").save_pretrained(tmp_path / "upload", with_code=True)
    shutil.copytree(tmp_path / "upload", tmp_path / "second")
    with (tmp_path / "second" / "experts.py").open("a", encoding="utf-8") as file:
        file.write("\n# another version\n")
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import torch
        import modeling_k3
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.dynamic_module_utils import get_class_from_dynamic_module
        def load(cls):
            model = cls.from_pretrained(sys.argv[2], dtype="auto")
            forms = {m.storage for m in model.modules() if hasattr(m, "storage")}
            assert forms == {"packed"}, forms
            return model
        ids = torch.arange(12)[None]
        first = load(AutoModelForCausalLM)
        other = get_class_from_dynamic_module("modeling_k3.K3ForCausalLM", sys.argv[2])
        assert other is not modeling_k3.K3ForCausalLM and other.__module__.startswith("transformers_modules.")
        models = [first, load(other), load(AutoModelForCausalLM), load(other), load(modeling_k3.K3ForCausalLM)]
        assert [type(m) is other for m in models] == [False, True, False, True, False]
        second = get_class_from_dynamic_module("modeling_k3.K3ForCausalLM", sys.argv[5])
        assert len({each.__module__ for each in (modeling_k3.K3ForCausalLM, other, second)}) == 3
        models += [load(second), load(other)]
        assert [type(m) for m in models[5:]] == [second, other]
        wanted = models[0](ids).logits
        assert all(torch.equal(m(ids).logits, wanted) for m in models)
        cache = models[1](ids[:, :5], use_cache=True).cache
        assert type(cache).__module__ != "modeling_k3.cache"
        for target, model in zip(sys.argv[3:], models[1:3]):
            model.save_pretrained(target, with_code=False)
        mixed = models[0].generate(ids, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)
        assert torch.equal(mixed, models[3].generate(ids, max_new_tokens=4, do_sample=False))
        print("packed")
    """
    targets = [str(tmp_path / name) for name in ("a", "b", "second")]
    said = run(code, str(ROOT), str(tmp_path / "upload"), *targets, home=tmp_path, HF_HUB_OFFLINE="1")
    assert said == "packed"
    source = read_directory(tmp_path / "upload")
    assert read_directory(tmp_path / "a") == read_directory(tmp_path / "b") == source
