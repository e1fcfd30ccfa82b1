"""A stand-in for the whole release: true names, dtypes, shapes and files, almost no disk.

Files are sparse: a header, then holes that read as zeros. Real values stand in embedding, head, norms and routers (so
that routing spreads over the experts), in everything but the experts of the first three layers, and in a few experts:
one of every shard, and in the first expert layers some of those that the prompt chooses.
"""

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from modeling_k3.conversion.tiny import random_tensor
from modeling_k3.tensor_files import DTYPES, INDEX_NAME, TensorFile
from modeling_k3.tensor_writer import Item, split_items

PREFIX = "language_model."
REAL_LAYERS = 3
_BLOCK = 1 << 24


def manifest_items(manifest: dict[str, Any], depth: int) -> list[Item]:
    """Every tensor of the release whose layer is below `depth`, in the order of the layers."""
    layers = {
        "all": range(manifest["num_layers"]),
        "kda": manifest["kda_layers"],
        "mla": manifest["mla_layers"],
        "dense": manifest["dense_layers"],
        "moe": range(manifest["moe_layers"][0], manifest["moe_layers"][1] + 1),
    }
    experts = 896
    by_layer: dict[int, list[Item]] = {i: [] for i in range(-1, manifest["num_layers"])}
    for entry in manifest["tensors"]:
        kind, _, times = entry["layers"].partition(" x ")
        for i in layers.get(kind, [-1]):
            for e in range(experts if times else 1):
                for stored in entry["released"]:
                    name = stored["name"].format(i=i, e=e)
                    by_layer[i].append(_item(name, stored["dtype"], stored["shape"]))
    for entry in manifest["vision_tensors_in_release"]:
        for b in range(entry["count"]):
            by_layer[-1].append(_item(entry["name"].format(b=b), entry["dtype"], entry["shape"]))
    for items in by_layer.values():
        # An expert's six tensors side by side, as a reader would want them.
        items.sort(key=lambda item: _numbers(item.name))
    return [item for i in range(-1, depth) for item in by_layer[i]]


def _item(name: str, dtype: str, shape: Sequence[int]) -> Item:
    return Item(name, dtype, tuple(shape), lambda: torch.empty(0))


def _numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def divide(items: list[Item], shards: int) -> list[list[Item]]:
    """Cut the tensors into files of about the same size, in order."""
    total = sum(item.nbytes for item in items)
    parts = split_items(items, -(-total // shards) + max(item.nbytes for item in items) // 2)
    while len(parts) < shards:
        largest = max(range(len(parts)), key=lambda i: sum(item.nbytes for item in parts[i]))
        middle = len(parts[largest]) // 2
        parts[largest : largest + 1] = [parts[largest][:middle], parts[largest][middle:]]
    return parts


def build(directory: Path, config: dict[str, Any], items: list[Item], shards: int, seed: int) -> list[str]:
    """Write the files.

    Args:
        directory: made if it is not there.
        config: for config.json.
        items: all tensors.
        shards: number of files.
        seed: of the real values.

    Returns:
        The expert of every shard that has real bytes, by the stem of its names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    parts = divide(items, shards)
    weight_map, seeded = {}, []
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):06d}.safetensors"
        path = directory / name
        _write_sparse(path, part)
        weight_map |= {item.name: name for item in part}
        expert = whole_expert(part)
        seeded += [expert] if expert else []
        fill(path, [item for item in part if is_real(item.name) or (expert and item.name.startswith(expert))], seed)
    total = sum(item.nbytes for item in items)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    return seeded


def is_real(name: str) -> bool:
    """Whether a tensor gets values, experts aside."""
    parts = name.split(".")
    # A random bias would send all tokens to the same experts; a trained one balances.
    if not name.startswith(PREFIX) or "experts" in parts or parts[-1] == "e_score_correction_bias":
        return False
    is_early = "layers" in parts and int(parts[parts.index("layers") + 1]) < REAL_LAYERS
    is_norm = "norm" in parts[-2] and parts[-2] != "o_norm"
    return is_early or is_norm or "gate" in parts or parts[-2] in ("embed_tokens", "lm_head")


def fill(path: Path, items: Sequence[Item], seed: int) -> int:
    """Write real values into the places of tensors; returns the bytes written."""
    entries = TensorFile(path).entries
    written = 0
    with open(path, "r+b", buffering=0) as file:
        for item in items:
            file.seek(entries[item.name].start)
            for piece in _pieces(item, seed):
                written += file.write(memoryview(piece.reshape(-1).view(torch.uint8).numpy()))
    return written


def _pieces(item: Item, seed: int) -> Iterator[torch.Tensor]:
    """The values of a tensor in pieces of a few megabytes; the rows of large matrices repeat a block, rotated."""
    count = item.nbytes // DTYPES[item.dtype].itemsize
    if item.dtype == "U8" or count <= _BLOCK:
        values = random_tensor(item, seed)
        if item.name.endswith(".A_log"):
            values[96:] = 0
        yield values.contiguous()
        return
    width = item.shape[-1]
    rows = _BLOCK // width
    block = random_tensor(Item(item.name, item.dtype, (rows, width), item.make), seed)
    for start in range(0, item.shape[0], rows):
        # Rotated by another amount each time, so that no two rows are the same.
        shift = 1 + zlib.crc32(f"{item.name} {start}".encode()) % (width - 1)
        yield block.roll(shift, dims=-1)[: item.shape[0] - start].contiguous()


def fill_experts(directory: Path, experts: Sequence[str], items: Sequence[Item], seed: int) -> None:
    """Write real bytes into whole experts, named by their stems."""
    weight_map = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    for item in items:
        if any(item.name.startswith(expert) for expert in experts):
            fill(directory / weight_map[item.name], [item], seed)


def expert_stem(layer: int, expert: int) -> str:
    """What the names of one expert's tensors start with."""
    return f"{PREFIX}model.layers.{layer}.block_sparse_moe.experts.{expert}."


def whole_expert(part: Sequence[Item]) -> str | None:
    """An expert in the middle of a shard, all six tensors of which stand in it."""
    counts: dict[str, int] = {}
    for item in part:
        stem, found, rest = item.name.partition(".experts.")
        if found:
            counts[f"{stem}.experts.{rest.split('.')[0]}."] = counts.get(f"{stem}.experts.{rest.split('.')[0]}.", 0) + 1
    whole = [stem for stem, count in counts.items() if count == 6]
    return whole[len(whole) // 2] if whole else None


def _write_sparse(path: Path, items: Sequence[Item]) -> None:
    """A file with a header and a hole of the right size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in sorted(items, key=lambda item: -DTYPES[item.dtype].itemsize):
        end = offset + item.nbytes
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + offset)
