"""Helpers for tests that read and change checkpoint directories byte by byte, sharing no code with the package."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.parity.golden import COMMITTED

INDEX = "model.safetensors.index.json"
_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "I64": 8, "I32": 4, "F8_E4M3": 1, "F8_E5M2": 1}


class Raw(NamedTuple):
    """A tensor as it stands in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def released(case: str = "mxfp4_release") -> Path:
    """The committed checkpoint of a case in the released layout."""
    return COMMITTED / case / "checkpoint"


def copy_of(target: Path, case: str = "mxfp4_release") -> Path:
    """A copy of it to change."""
    shutil.copytree(released(case), target)
    return target


def read_file(path: Path) -> dict[str, Raw]:
    """All tensors of one file."""
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    found = {}
    for name, entry in json.loads(blob[8 : 8 + length]).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            found[name] = Raw(entry["dtype"], tuple(entry["shape"]), blob[8 + length + start : 8 + length + stop])
    return found


def read_directory(directory: Path) -> dict[str, Raw]:
    """All tensors of all files, each name once; and where there is an index, it names exactly them."""
    found: dict[str, Raw] = {}
    files = sorted(directory.glob("*.safetensors"))
    for path in files:
        tensors = read_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
        if (directory / INDEX).exists():
            weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
            assert {name for name, file in weight_map.items() if file == path.name} == set(tensors)
    if (directory / INDEX).exists():
        index = json.loads((directory / INDEX).read_text())
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(len(raw.data) for raw in found.values())
    return found


def write_file(path: Path, tensors: Mapping[str, Raw]) -> None:
    """Write one file."""
    header, offset = {}, 0
    ordered = sorted(tensors.items(), key=lambda item: -_SIZES[item[1].dtype])
    for name, raw in ordered:
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [offset, offset + len(raw.data)]}
        offset += len(raw.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(raw.data for _, raw in ordered))


def zeros(dtype: str, *shape: int) -> Raw:
    """A tensor of zero bytes."""
    return Raw(dtype, shape, bytes(math.prod(shape) * _SIZES[dtype]))


def change(directory: Path, rule: Callable[[str, Raw], Mapping[str, Raw]]) -> None:
    """Rewrite every tensor of every file by a rule (name, tensor) -> what stands there instead, and the index."""
    weight_map, total = {}, 0
    for path in sorted(directory.glob("*.safetensors")):
        tensors: dict[str, Raw] = {}
        for name, raw in read_file(path).items():
            tensors |= rule(name, raw)
        write_file(path, tensors)
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(len(raw.data) for raw in tensors.values())
    if (directory / INDEX).exists():
        index = json.loads((directory / INDEX).read_text())
        index["weight_map"], index["metadata"]["total_size"] = weight_map, total
        (directory / INDEX).write_text(json.dumps(index))


def edit_index(directory: Path, edit: Callable[[dict[str, str]], None]) -> None:
    """Change the weight map of the index and nothing else."""
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def edit_config(directory: Path, edit: Callable[[dict], None]) -> None:
    """Change config.json."""
    config = json.loads((directory / "config.json").read_text())
    edit(config)
    (directory / "config.json").write_text(json.dumps(config))


def text_of(tensors: Mapping[str, Raw]) -> dict[str, Raw]:
    """The text model's tensors."""
    return {name: raw for name, raw in tensors.items() if name.startswith("language_model.")}


#: Two layers and the head on disk, the rest on the CPU; a valid map names every part.
MIXED = {
    "model.embed_tokens": "cpu",
    **{f"model.layers.{i}": "disk" if i in (1, 3) else "cpu" for i in range(9)},
    "model.output_attn_res_norm": "cpu",
    "model.output_attn_res_proj": "cpu",
    "model.norm": "cpu",
    "lm_head": "disk",
}
