"""Names, headers, indices and the writer: what stands between a directory and a model."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from modeling_k3.checkpoint import Checkpoint, canonical, check_loaded, is_vision, layer_of
from modeling_k3.placement import available_memory
from modeling_k3.tensor_files import TensorFile, read_index
from modeling_k3.tensor_writer import Item, shard_name, split_items, write_checkpoint, write_shard
from tests.models import build, tiny_config


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("language_model.model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("model.norm.weight", "norm.weight"),
        ("language_model.model.output_attn_res_proj.weight", "output_attn_res_proj.weight"),
        ("model.vision_tower.layers.0.weight", "model.vision_tower.layers.0.weight"),
        ("score.weight", "score.weight"),
    ],
)
def test_canonical_names(name: str, short: str) -> None:
    assert canonical(name) == short
    assert canonical(short) == short


def test_layers_and_vision() -> None:
    assert layer_of("layers.12.mlp.up_proj.weight") == 12
    assert layer_of("norm.weight") is None
    assert is_vision("vision_tower.layers.0.weight")
    assert is_vision("mm_projector.proj.0.weight")
    assert not is_vision("language_model.model.layers.0.vision_tower.weight")


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randint(0, 256, (4, 4), dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }


def test_what_we_write_others_read(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_shard(path, [Item.of(name, tensor) for name, tensor in tensors.items()], {"format": "pt"})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_what_others_write_we_read(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"who": "me"})
    file = TensorFile(path)
    assert file.metadata == {"who": "me"}
    for name, tensor in tensors.items():
        entry = file.entries[name]
        for read in (file.read, file.view, file.fixed_view):
            found = read(entry)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
    with torch.no_grad():
        file.view(file.entries["a"]).zero_()
    assert torch.equal(TensorFile(path).read(file.entries["a"]), tensors["a"])


def test_data_that_is_not_aligned(tmp_path: Path) -> None:
    """A header of odd length puts the numbers between the multiples of their size."""
    values = torch.randn(5)
    header = json.dumps({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    header += b" " * (1 + (-len(header)) % 4)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    file = TensorFile(path)
    assert file.entries["a"].start % 4
    for read in (file.read, file.view, file.fixed_view):
        assert torch.equal(read(file.entries["a"]), values)


def test_reading_into_a_tensor_of_another_size(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="needed are 60"):
        file.read_into(file.entries["a"], torch.empty(16))


def raw_file(path: Path, header: Any, data: bytes = b"", announced: int | None = None) -> TensorFile:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if announced is None else announced) + text + data)
    return TensorFile(path)


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": ENTRY}, b"123", "truncated"),
        ({"a": ENTRY}, b"12345", "longer than its header says"),
        ({"a": {**ENTRY, "shape": [5]}}, b"1234", "does not fill"),
        ({"a": {**ENTRY, "shape": [-2, -2]}}, b"1234", "has shape"),
        ({"a": {**ENTRY, "shape": [4.0]}}, b"1234", "has shape"),
        ({"a": {**ENTRY, "dtype": "U9"}}, b"1234", "dtype 'U9'"),
        ({"a": {**ENTRY, "data_offsets": [0, 4, 5]}}, b"1234", "pair of data_offsets"),
        ({"a": {"dtype": "U8"}}, b"1234", "no dtype, shape"),
        ({"a": ENTRY, "b": ENTRY}, b"1234", "starts at byte"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [5, 9]}}, b"123456789", "starts at byte"),
        ([1, 2], b"", "allowed is an object"),
        (b'{"a": ', b"", "not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", "stands there twice"),
        (b"\xff\xfe", b"", "not valid JSON"),
    ],
)
def test_broken_headers(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    file = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ValueError, match=message):
        _ = file.entries


@pytest.mark.parametrize("announced", [10**6, 2**63, 2**64 - 1])
def test_headers_longer_than_the_file(announced: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="truncated or no safetensors file"):
        _ = raw_file(tmp_path / "x.safetensors", {"a": ENTRY}, b"1234", announced).entries
    (tmp_path / "short.safetensors").write_bytes(b"123")
    with pytest.raises(ValueError, match="truncated"):
        _ = TensorFile(tmp_path / "short.safetensors").entries


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_a_readable_error(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("noise") / "x.safetensors"
    path.write_bytes(noise)
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        _ = TensorFile(path).entries


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "x.bin", "", None, 3, "a\\x.safetensors"]
)
def test_index_entries_that_lead_outside(file: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match="inside the directory"):
        read_index(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "b", "a": "c"}}'])
def test_broken_indices(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a checkpoint index"):
        read_index(path)


# -- writing --------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 50), max_size=30), most=st.integers(1, 60))
def test_shards_hold_everything_in_order(sizes: list[int], most: int) -> None:
    items = [Item(str(i), "U8", (size,), lambda: torch.empty(0)) for i, size in enumerate(sizes)]
    shards = split_items(items, most)
    assert [item for shard in shards for item in shard] == items
    assert all(sum(item.nbytes for item in shard) <= most or len(shard) == 1 for shard in shards if shard)


def test_a_sharded_directory(tmp_path: Path) -> None:
    items = [Item.of(f"t{i}", torch.full((10,), i, dtype=torch.uint8)) for i in range(7)]
    write_checkpoint(tmp_path, items, 25, digits=6, total_parameters=70)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(shard_name(i, 4, digits=6) for i in (1, 2, 3, 4)),
        "model.safetensors.index.json",
    ]
    checkpoint = Checkpoint.from_directory(tmp_path)
    found, absent, unlisted = checkpoint.locate(checkpoint.where)
    assert (absent, unlisted) == ([], [])
    assert [int(file.read(entry)[0]) for file, entry in (found[f"t{i}"] for i in range(7))] == list(range(7))
    same = Checkpoint.from_files([tmp_path / shard_name(i, 4, digits=6) for i in (1, 2, 3, 4)])
    assert same.where.keys() == checkpoint.where.keys()


def test_a_tensor_that_is_not_what_was_announced(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="announced F32"):
        write_shard(tmp_path / "x.safetensors", [Item("a", "F32", (3,), lambda: torch.zeros(4))])
    assert not (tmp_path / "x.safetensors").exists()


def test_two_files_with_the_same_tensor(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"t": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="stands in both"):
        Checkpoint.from_files([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


# -- the report -----------------------------------------------------------------------------------------------------


def info(**found: Any) -> dict[str, Any]:
    return {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": [], **found}


def test_check_loaded_names_the_first_few() -> None:
    model = build(tiny_config())
    check_loaded(info(), model, "here")
    with pytest.raises(ValueError, match=r"'here'.*7 missing: k0, k1, k2, k3, k4, \.\.\..*1 unknown: x.*strict=False"):
        check_loaded(info(missing_keys=[f"k{i}" for i in range(7)], unexpected_keys=["x"]), model, "here")
    with pytest.raises(ValueError, match=r"1 of another shape: model\.norm\.weight"):
        check_loaded(info(mismatched_keys=[("model.norm.weight", (3,), (4,))]), model, "here")
    check_loaded(info(unexpected_keys=["model.layers.5.x", "vision_tower.y", "mm_projector.z"]), model, "here")
    check_loaded(info(unexpected_keys=["lm_head.weight", "layers.99.x"]), model.model, "here")
    with pytest.raises(ValueError, match=r"model\.layers\.4\.x"):
        check_loaded(info(unexpected_keys=["model.layers.4.x"]), model, "here")


def test_memory_is_a_number_of_bytes() -> None:
    assert 2**20 < available_memory() < 2**50
