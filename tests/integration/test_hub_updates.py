"""What a second upload, a branch, the library's own writing and a model from the hub do to a repository.

One process does it all with the complete client (hf_xet too) and files that go into the commit itself.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from modeling_k3 import K3ForCausalLM
from tests.hub_server import Hub, serve
from tests.layout_source import ROOT
from tests.uploads import BLOCKED, USE, ask, check_answer, logged_in, needed_files, run

STORY = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    import torch
    from huggingface_hub import HfApi
    from modeling_k3 import K3ForCausalLM, K3Tokenizer
    model, home, api = K3ForCausalLM.from_pretrained(sys.argv[2]), Path(sys.argv[3]), HfApi()
    tokenizer, ids = K3Tokenizer.from_pretrained(sys.argv[2]), torch.arange(12)[None]
    def change():
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
    def card(text):
        return f"---\\ntags: [mine]\\n---\\n{text}"
    def by_hand(repo, name, text, **options):
        api.upload_file(path_or_fileobj=text.encode(), path_in_repo=name, repo_id=repo, **options)

    # Written by the library, into a folder with something else.
    model.push_to_hub("somebody/whole", tokenizer=tokenizer)
    (home / "library").mkdir()
    (home / "library" / "optimizer.bin").write_bytes(b"not for the hub")
    model.save_pretrained(
        home / "library", push_to_hub=True, repo_id="somebody/library", save_original_format=False,
        commit_message="by the library", commit_description="in its own names", private=True,
    )

    # Other weights in other files.
    model.push_to_hub("somebody/files", variant="first")
    for size in ("50GB", "40KB", "100KB", "50GB"):
        change()
        model.push_to_hub("somebody/files", max_shard_size=size)
        again = K3ForCausalLM.from_pretrained("somebody/files")
        assert torch.equal(again(ids).logits, model(ids).logits), size

    # Cards by hand, on two branches.
    repo = "somebody/cards"
    model.push_to_hub(repo, tags=["first"])
    by_hand(repo, "README.md", card("by hand"))
    change()
    model.push_to_hub(repo, revision="dev", commit_message="from main")
    by_hand(repo, "README.md", card("for dev"), revision="dev")
    change()
    model.push_to_hub(repo, revision="dev", commit_message="on dev", card={})
    for branch in ("main", "dev"):
        change()
        model.save_pretrained(home / branch, push_to_hub=True, repo_id=repo, revision=branch, commit_message="saved")
    change()
    (home / "main" / "README.md").write_text(card("local"))
    model.save_pretrained(home / "main", push_to_hub=True, repo_id=repo)
    model.save_pretrained(home / "main", push_to_hub=True, repo_id="somebody/local")

    # From the hub, and on.
    model.push_to_hub("somebody/origin")
    head = "license: other\\nlicense_name: mine\\nlicense_link: https://example.org/mine\\nbase_model: a/b"
    by_hand("somebody/origin", "README.md", f"---\\n{head}\\n---\\n")
    for name in ("LICENSE", "NOTICE.md", "notes.md"):
        by_hand("somebody/origin", name, name)
    child = K3ForCausalLM.from_pretrained("somebody/origin")
    child.push_to_hub("somebody/child")
    child.save_pretrained(home / "same", with_code=True, repository="somebody/origin")
    child.push_to_hub("somebody/own", card={"license": "mit", "base_model": "c/d"})
"""


@pytest.fixture(scope="module")
def told(uploaded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Path]]:
    home = logged_in(tmp_path_factory.mktemp("home"))
    with serve() as hub:
        run(STORY, str(ROOT), str(uploaded), str(home), home=home, HF_ENDPOINT=hub.endpoint)
        yield hub, home


def head_of(card: bytes) -> dict[str, str]:
    return yaml.safe_load(card.decode().split("---\n")[1])


def test_what_the_library_writes_goes_up_whole(told: tuple[Hub, Path]) -> None:
    """With code, class map and card, as what we write ourselves."""
    files = told[0].files("somebody/library")
    assert files.keys() == needed_files() | {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert json.loads(files["config.json"])["auto_map"]["AutoModelForCausalLM"] == "modeling_k3.K3ForCausalLM"
    assert b"not-stated" in files["README.md"]
    assert (told[1] / "library" / "optimizer.bin").is_file()


def test_an_earlier_layout_goes(told: tuple[Hub, Path]) -> None:
    """Loaders take model.safetensors where it is; weights of another variant stay."""
    states = [
        sorted(name for name in files if name.startswith("model.") or name.startswith("model-"))
        for files in told[0].repositories["somebody/files"].commits.values()
    ][1:]
    first, single, many, fewer, again = states
    assert first == ["model.first.safetensors"] and single == again == [*first, "model.safetensors"]
    index = "model.safetensors.index.json"
    assert len(many) > len(fewer) > 3 and index in many and index in fewer
    assert "model.safetensors" not in many + fewer and set(first) <= set(many) & set(fewer)


def test_cards_by_hand_stay_where_they_are(told: tuple[Hub, Path]) -> None:
    hub = told[0]
    commits = hub.repositories["somebody/cards"].commits.values()
    cards = [files.get("README.md", b"") for files in commits]
    by_hand = [b"by hand", b"by hand", b"for dev", b"for dev", b"by hand", b"for dev", b"by hand"]
    assert b"first" in cards[1] and [card.rpartition(b"\n")[2] for card in cards[2:]] == by_hand
    assert hub.files("somebody/cards")["README.md"].endswith(b"by hand")
    assert hub.files("somebody/cards", "dev")["README.md"].endswith(b"for dev")
    # Where there is none, the one in the folder goes.
    assert hub.files("somebody/local")["README.md"].endswith(b"local")


def test_where_weights_come_from_is_passed_on(told: tuple[Hub, Path]) -> None:
    """Licence, base model, and the files that have to go with every copy."""
    hub, home = told
    child, own = hub.files("somebody/child"), hub.files("somebody/own")
    said = {"license": "other", "license_name": "mine", "license_link": "https://example.org/mine"}
    assert said.items() <= head_of(child["README.md"]).items()
    assert head_of(child["README.md"])["base_model"] == "somebody/origin"
    assert b"The weights are under mine." in child["README.md"]
    assert (child["LICENSE"], child["NOTICE.md"]) == (b"LICENSE", b"NOTICE.md") and "notes.md" not in child
    same = head_of((home / "same" / "README.md").read_bytes())
    assert said.items() <= same.items() and same["base_model"] == "a/b"
    assert (home / "same" / "LICENSE").is_file()
    # What is said counts.
    mine = head_of(own["README.md"])
    assert (mine["license"], mine["base_model"]) == ("mit", "c/d") and "license_name" not in mine


def test_push_pull_load_with_files_in_the_commit(
    told: tuple[Hub, Path], byte_model: K3ForCausalLM, tmp_path: Path
) -> None:
    """The complete client, elsewhere, without the package and without a token."""
    results, away = ask(tmp_path), tmp_path / "away"
    away.mkdir()
    said = run(BLOCKED + USE, "somebody/whole", results, str(away / "copy"), home=away, HF_ENDPOINT=told[0].endpoint)
    assert said == "['dense'] K3Tokenizer [100, 101, 102, 32, 120] [258, 257]"
    check_answer(results, byte_model)
    assert not told[0].large.uploads


def test_whoever_is_not_logged_in_cannot_write(tmp_path: Path) -> None:
    code = """
        from huggingface_hub import HfApi
        try:
            HfApi().create_repo("somebody/tokens")
        except Exception as error:
            print(error)
    """
    with serve() as hub:
        said = run(code, home=tmp_path, HF_ENDPOINT=hub.endpoint)
        assert "401" in said and not hub.repositories


@pytest.mark.slow
def test_trainer_pushes(told: tuple[Hub, Path], uploaded: Path, tmp_path: Path) -> None:
    """`TrainingArguments(push_to_hub=True)` of a class that was registered: weights, code and class map."""
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import torch
        from transformers import Trainer, TrainingArguments
        from modeling_k3 import K3ForCausalLM
        K3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
        model = K3ForCausalLM.from_pretrained(sys.argv[2])
        data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
        options = TrainingArguments(
            "trained", max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, push_to_hub=True,
            hub_model_id="somebody/trained", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )
        trainer = Trainer(model, options, train_dataset=data)
        trainer.train()
        trainer.push_to_hub()
        assert not torch.equal(model.lm_head.weight, K3ForCausalLM.from_pretrained(sys.argv[2]).lm_head.weight)
        loaded = K3ForCausalLM.from_pretrained("somebody/trained")
        assert torch.equal(model.lm_head.weight, loaded.lm_head.weight)
    """
    run(code, str(ROOT), str(uploaded), home=logged_in(tmp_path), HF_ENDPOINT=told[0].endpoint)
    files = told[0].files("somebody/trained")
    assert needed_files() <= files.keys() and {"model.safetensors", "README.md"} <= files.keys()
    assert json.loads(files["config.json"])["auto_map"]["AutoModelForCausalLM"] == "modeling_k3.K3ForCausalLM"
