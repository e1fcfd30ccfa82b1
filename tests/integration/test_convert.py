"""`k3 convert`: every conversion and its way back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.configuration import preset_path
from modeling_k3.conversion.cli import app
from modeling_k3.conversion.convert import Options, convert
from modeling_k3.conversion.tiny import make_tiny
from modeling_k3.conversion.verify import verify
from tests.checkpoints import change, copy_of, edit_index, read_directory, released

CASES = ("mxfp4_release", "mxfp4_release_wide")
IDS = torch.tensor([[5, 3, 5, 8, 9, 7, 9]])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return K3ForCausalLM.from_pretrained(folder, experts_implementation="eager")(IDS).logits


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, tmp_path: Path) -> None:
    source = released(case)
    before = contents(source)
    whole = read_directory(source)
    text = {name: raw for name, raw in whole.items() if name.startswith("language_model.")}
    convert(source, tmp_path / "flat", Options(layout="flat"))
    assert read_directory(tmp_path / "flat") == {k.removeprefix("language_model."): raw for k, raw in text.items()}
    assert json.loads((tmp_path / "flat" / "config.json").read_text())["model_type"] == "k3"
    convert(tmp_path / "flat", tmp_path / "back", Options(layout="released", like=source))
    assert read_directory(tmp_path / "back") == whole
    convert(tmp_path / "flat", tmp_path / "plain", Options(layout="released"))
    assert read_directory(tmp_path / "plain") == text
    convert(source, tmp_path / "bf16", Options(experts="bf16", max_shard_size="150KB"))
    assert all(raw.dtype != "U8" for raw in read_directory(tmp_path / "bf16").values())
    convert(tmp_path / "bf16", tmp_path / "mxfp4", Options(experts="mxfp4", max_shard_size="1GB"))
    assert read_directory(tmp_path / "mxfp4") == whole
    convert(source, tmp_path / "text", Options(vision=False))
    assert read_directory(tmp_path / "text") == text
    convert(source, tmp_path / "split", Options(max_shard_size="50KB"))
    convert(tmp_path / "split", tmp_path / "merged", Options(max_shard_size="1TB"))
    assert read_directory(tmp_path / "split") == read_directory(tmp_path / "merged") == whole
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    expected = logits(source)
    for folder in ("flat", "back", "plain", "bf16", "mxfp4", "text", "split", "merged"):
        assert torch.equal(logits(tmp_path / folder), expected), folder
        assert not (tmp_path / f"{folder}.partial").exists()
        assert not list((tmp_path / folder).glob("*.partial"))
    assert contents(source) == before


def test_shards_of_the_source_are_kept(tmp_path: Path) -> None:
    convert(released(), tmp_path / "flat", Options(layout="flat"))
    names = sorted(path.name for path in (tmp_path / "flat").glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    largest = max(path.stat().st_size for path in released().glob("*.safetensors"))
    assert all((tmp_path / "flat" / name).stat().st_size <= largest + 1000 for name in names)


def test_other_files_come_along(tmp_path: Path) -> None:
    source = copy_of(tmp_path / "source")
    for name in ("generation_config.json", "tokenizer_config.json", "modeling_kimi_k3.py", "pytorch_model.bin"):
        (source / name).write_text("{}")
    convert(source, tmp_path / "split", Options(max_shard_size="200KB"))
    convert(source, tmp_path / "flat", Options(layout="flat"))
    assert (tmp_path / "split" / "modeling_kimi_k3.py").is_file()
    for folder in ("split", "flat"):
        found = {path.name for path in (tmp_path / folder).iterdir()}
        assert {"generation_config.json", "tokenizer_config.json"} <= found
        assert "pytorch_model.bin" not in found
    assert not (tmp_path / "flat" / "modeling_kimi_k3.py").exists()


def test_a_finished_target(tmp_path: Path) -> None:
    """The same job again is done already; another one does not touch it."""
    convert(released(), tmp_path / "out", Options(layout="flat"))
    before = contents(tmp_path / "out")
    assert convert(released(), tmp_path / "out", Options(layout="flat")) == tmp_path / "out"
    with pytest.raises(FileExistsError, match="exists already"):
        convert(released(), tmp_path / "out", Options(vision=False))
    assert contents(tmp_path / "out") == before
    for inside in (released(), released() / "new"):
        with pytest.raises(ValueError, match="never changed"):
            convert(released(), inside, Options(layout="flat"))


def test_another_job_starts_afresh(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "model-00001-of-00003.safetensors").write_bytes(b"of something else")
    (partial / "conversion.json").write_text('{"fingerprint": "other"}')
    convert(released(), tmp_path / "out", Options(layout="flat"))
    convert(released(), tmp_path / "other", Options(layout="flat"))
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("modeling_k3.conversion.job.shutil.disk_usage", lambda path: usage(1, 1, 1000))
    with pytest.raises(OSError, match="GB are to be written"):
        convert(released(), tmp_path / "out", Options(layout="flat"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "round"}, r"layout='round'"),
        ({"experts": "int4"}, r"experts='int4'"),
        ({"max_shard_size": "many"}, r"max_shard_size='many'"),
        ({"like": Path("x")}, r"like='x'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)


def test_a_wrapper_of_another_model_is_refused(tmp_path: Path) -> None:
    convert(released(), tmp_path / "flat", Options(layout="flat"))
    config = json.loads((tmp_path / "flat" / "config.json").read_text())
    wrong = copy_of(tmp_path / "wrong")
    other = json.loads((wrong / "config.json").read_text())
    other["text_config"]["vocab_size"] = config["vocab_size"] + 8
    (wrong / "config.json").write_text(json.dumps(other))
    said = rf"vocab_size={config['vocab_size'] + 8} \(source: {config['vocab_size']}"
    for source in (tmp_path / "flat", released()):
        with pytest.raises(ValueError, match=said):
            convert(source, tmp_path / "out", Options(layout="released", like=wrong))
    assert not list(tmp_path.glob("out*"))


def test_broken_sources(tmp_path: Path) -> None:
    source = copy_of(tmp_path / "source")
    lost = "language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight_scale"
    change(source, lambda name, raw: {} if name == lost else {name: raw})
    with pytest.raises(ValueError, match="of half a pair"):
        convert(source, tmp_path / "out", Options(experts="bf16"))
    source = copy_of(tmp_path / "second")
    edit_index(source, lambda weight_map: weight_map.pop(lost))
    with pytest.raises(ValueError, match="in a file only"):
        convert(source, tmp_path / "out", Options(layout="flat"))
    file = sorted(source.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="truncated"):
        convert(source, tmp_path / "out", Options(layout="flat"))
    assert not (tmp_path / "out").exists()


# -- tiny and verify ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
def test_tiny(experts: str, tmp_path: Path) -> None:
    config = K3Config.from_pretrained(preset_path("tiny"))
    for name in ("a", "b"):
        make_tiny(tmp_path / name, config, experts=experts, max_shard_size="100KB")
    make_tiny(tmp_path / "c", config, experts=experts, seed=1, tokens=0)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not (tmp_path / "c" / "golden.safetensors").exists()
    tensors = {path.name for path in (tmp_path / "a").glob("*.safetensors")} - {"golden.safetensors"}
    assert len(tensors) > 2
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == "kimi_k3"
    golden = load_file(tmp_path / "a" / "golden.safetensors")
    options = {"dtype": torch.float32, "experts_implementation": "eager", "dequantize": experts == "mxfp4"}
    model, info = K3ForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True, **options)
    assert not any(info.values())
    with torch.no_grad():
        found = model(golden["input_ids"], output_router_logits=True)
    assert torch.equal(found.logits, golden["logits"])
    assert golden["logits"].std() > 0.5
    assert golden["layers.1.router_indices"].unique().numel() > 4
    again = load_file(tmp_path / "c" / "model.safetensors")
    stored = next(name for name in again if name.endswith("A_log"))
    assert again[stored].shape == (64,)
    assert again[stored][:3].all()
    assert not again[stored][3:].any()


def test_verify(tmp_path: Path) -> None:
    assert verify(released(), released()).is_same
    convert(released(), tmp_path / "bf16", Options(layout="flat", experts="bf16"))
    report = verify(released(), tmp_path / "bf16")
    assert report.is_same
    assert report.equal == 8 * 8 * 3
    other = copy_of(tmp_path / "other")
    norm = "language_model.model.norm.weight"
    gate = "language_model.model.layers.1.block_sparse_moe.gate.weight"
    change(other, lambda name, raw: {name: raw._replace(data=raw.data[::-1]) if name in (norm, gate) else raw})
    report = verify(released(), other)
    assert sorted(each.name for each in report.different) == ["layers.1.block_sparse_moe.gate.weight", "norm.weight"]
    assert report.logits_max_abs is not None
    assert report.logits_max_abs > 0
    assert 0 < report.routes_changed <= report.routes == 16 * 8
    assert any("norm.weight" in line for line in report.lines())
    change(other, lambda name, raw: {} if name == norm else {name: raw})
    assert verify(released(), other, tokens=0).only_first == ["norm.weight"]
    assert verify(other, released(), tokens=0).only_second == ["norm.weight"]


def test_commands(tmp_path: Path) -> None:
    run = CliRunner().invoke
    made = run(app, ["tiny", str(tmp_path / "a"), "--tokens", "4"])
    assert made.exit_code == 0, made.output
    for command, *extra in (["flat"], ["dequantize"], ["text"], ["shard", "--max-shard-size", "100KB"]):
        result = run(app, [command, str(tmp_path / "a"), str(tmp_path / command), *extra])
        assert result.exit_code == 0, result.output
        assert "tensors" in result.output
        same = run(app, ["verify", str(tmp_path / "a"), str(tmp_path / command), "--tokens", "4"])
        assert same.exit_code == 0, same.output
    assert run(app, ["quantize", str(tmp_path / "dequantize"), str(tmp_path / "q")]).exit_code == 0
    assert run(app, ["released", str(tmp_path / "flat"), str(tmp_path / "r")]).exit_code == 0
    made = run(app, ["tiny", str(tmp_path / "other"), "--seed", "1", "--tokens", "0"])
    assert run(app, ["verify", str(tmp_path / "a"), str(tmp_path / "other"), "--tokens", "0"]).exit_code == 1
    wrong = run(app, ["flat", str(tmp_path / "a"), str(tmp_path / "other")])
    assert wrong.exit_code == 2
    assert "exists already" in wrong.output
