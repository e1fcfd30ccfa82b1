"""Push, pull, load: the unpatched client library against a stand-in hub."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from modeling_k3 import K3ForCausalLM
from tests.checkpoints import released
from tests.hub_lfs import PART
from tests.hub_server import Hub, serve
from tests.layout_source import ROOT
from tests.uploads import BLOCKED, USE, ask, check_answer, logged_in, own_entries, python_without, run


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve(lfs=("*.safetensors",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that sends large files by the protocol that the stand-in speaks; any other fetches them from there."""
    return python_without("hf_xet", tmp_path_factory.mktemp("client"))


PUSH = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from modeling_k3 import K3ForCausalLM, K3Tokenizer
    model = K3ForCausalLM.from_pretrained(sys.argv[2])
    tokenizer = K3Tokenizer.from_pretrained(sys.argv[2])
    print(model.push_to_hub("somebody/pushed", tokenizer=tokenizer, card={"license": "mit", "base_model": "a/b"}))
    model.save_pretrained(sys.argv[3], push_to_hub=True, repo_id="somebody/saved")
    tokenizer.push_to_hub("somebody/tokens", commit_message="tokens only")
"""


def test_push_pull_load(hub: Hub, client: str, byte_model: K3ForCausalLM, uploaded: Path, tmp_path: Path) -> None:
    """The unpatched client, logged in, with its endpoint set and nothing else; weights by the large-file protocol."""
    results, home, local = ask(tmp_path), tmp_path / "home", tmp_path / "local"
    home.mkdir()
    local.mkdir()
    (local / "optimizer.bin").write_bytes(b"not for the hub")
    said = run(
        PUSH, str(ROOT), str(uploaded), str(local), home=logged_in(home), python=client, HF_ENDPOINT=hub.endpoint
    )
    assert said.startswith(f"{hub.endpoint}/somebody/pushed/commit/")
    files = hub.files("somebody/pushed")
    assert files.keys() == {p.name for p in uploaded.iterdir()}
    different = {name for name in files if files[name] != (uploaded / name).read_bytes()}
    assert different <= {"README.md", "generation_config.json", "tokenizer_config.json"}
    # In parts, joined and checked by the hub, asked for once by each of two repositories and sent once.
    oid = hashlib.sha256(files["model.safetensors"]).hexdigest()
    assert len(files["model.safetensors"]) > PART and hub.large.uploads == [("multipart", oid)]
    asked = [path.rpartition("/")[2] for _, path in hub.requests if "/info/lfs/" in path]
    assert (asked.count("batch"), asked.count("complete"), asked.count("verify")) == (2, 1, 1)
    tokenizer_config = (uploaded / "tokenizer_config.json").read_text()
    assert own_entries(files["tokenizer_config.json"].decode()) == own_entries(tokenizer_config)
    assert b"license: mit" in files["README.md"] and b'from_pretrained("somebody/pushed"' in files["README.md"]
    everything = b"".join([*files.values(), *hub.files("somebody/saved").values()])
    assert str(tmp_path).encode() not in everything and str(uploaded).encode() not in everything
    assert "optimizer.bin" not in hub.files("somebody/saved") and "modeling_k3.py" in hub.files("somebody/saved")
    tokens = hub.files("somebody/tokens")
    assert "tokenization_k3.py" in tokens and "README.md" not in tokens and "modeling_k3.py" not in tokens
    # Elsewhere: an empty home, no package.
    away = tmp_path / "away"
    away.mkdir()
    copy = str(tmp_path / "copy")
    said = run(BLOCKED + USE, "somebody/pushed", results, copy, home=away, HF_ENDPOINT=hub.endpoint)
    assert said == "['dense'] K3Tokenizer [100, 101, 102, 32, 120] [258, 257]"
    check_answer(results, byte_model)
    assert ("GET", f"/large/{oid}") in hub.requests
    # The client keeps a file under the tag it was told.
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in away.rglob(f"blobs/{oid}")] == [oid]


@pytest.mark.slow
def test_what_the_store_of_large_files_has_is_not_sent_again(
    hub: Hub, client: str, uploaded: Path, tmp_path: Path
) -> None:
    """And what is small goes in one piece; a client without hf_xet fetches the same way."""
    code = """
        import hashlib, sys
        sys.path.insert(0, sys.argv[1])
        from huggingface_hub import HfApi, hf_hub_download
        from modeling_k3 import K3ForCausalLM
        model, api = K3ForCausalLM.from_pretrained(sys.argv[2]), HfApi()
        for repo in ("somebody/one", "somebody/other"):
            model.push_to_hub(repo)
        api.upload_file(path_or_fileobj=b"small", path_in_repo="x.safetensors", repo_id="somebody/one")
        files = {file.path: file for file in api.list_repo_tree("somebody/one")}
        small = files["x.safetensors"]
        assert small.size == small.lfs.size == 5 and small.lfs.sha256 == hashlib.sha256(b"small").hexdigest()
        assert small.blob_id != small.lfs.sha256 and files["config.json"].lfs is None
        print(open(hf_hub_download("somebody/one", "x.safetensors")).read())
    """
    before = len(hub.large.uploads)
    said = run(
        code, str(ROOT), str(uploaded), home=tmp_path, python=client, HF_ENDPOINT=hub.endpoint, HF_TOKEN="hf_test"
    )
    assert said.splitlines()[-1] == "small"
    # The weights may be there from another test.
    assert [way for way, _ in hub.large.uploads[before:]] in (["multipart", "basic"], ["basic"])
    assert hub.files("somebody/one")["model.safetensors"] == hub.files("somebody/other")["model.safetensors"]
    hub.large.objects.pop(hub.large.oid_of(b"small") or "")
    assert not hub.large.put(hashlib.sha256(b"small").hexdigest(), b"other")


@pytest.mark.slow
def test_a_card_that_is_there_stays(hub: Hub, uploaded: Path, tmp_path: Path) -> None:
    """With the complete client, which is told to send large files by the protocol of the stand-in."""
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from huggingface_hub import HfApi
        from modeling_k3 import K3ForCausalLM
        model = K3ForCausalLM.from_pretrained(sys.argv[2])
        model.push_to_hub("somebody/card", tags=["first"])
        text = b"---\\ntags: [mine]\\n---\\nby hand"
        HfApi().upload_file(path_or_fileobj=text, path_in_repo="README.md", repo_id="somebody/card")
        model.push_to_hub("somebody/card")
    """
    options = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1"}
    run(code, str(ROOT), str(uploaded), home=logged_in(tmp_path), **options)
    assert any("info/lfs/objects/batch" in path for _, path in hub.requests if "somebody/card" in path)
    first, *_, last = (files.get("README.md") for files in list(hub.repositories["somebody/card"].commits.values())[1:])
    assert b'"first"' in (first or b"") and (last or b"").endswith(b"by hand")


@pytest.mark.slow
def test_the_first_layers_of_a_release_on_the_hub(hub: Hub, client: str, tmp_path: Path) -> None:
    """Only the files with their tensors come down; the code and the released config work from there as well."""
    source = tmp_path / "source"
    K3ForCausalLM.from_pretrained(released(), dtype="auto").save_pretrained(source, max_shard_size="20KB")
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from modeling_k3 import K3ForCausalLM
        model = K3ForCausalLM.from_pretrained(sys.argv[2], dtype="auto")
        model.push_to_hub("somebody/release", max_shard_size="20KB", card={"derived": True})
        part = K3ForCausalLM.from_pretrained("somebody/release", num_hidden_layers=1, dtype="auto")
        print(part.name_or_path, len(part.model.layers))
    """
    said = run(code, str(ROOT), str(source), home=logged_in(tmp_path), python=client, HF_ENDPOINT=hub.endpoint)
    assert said == "somebody/release 1"
    files = hub.files("somebody/release")
    assert b"license_name: kimi-k3" in files["README.md"]
    assert json.loads(files["config.json"])["model_type"] == "kimi_k3"
    weights = {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name.endswith(".safetensors")}
    fetched = [name for name, oid in weights.items() if ("GET", f"/large/{oid}") in hub.requests]
    assert fetched and len(fetched) < len(weights) / 2
