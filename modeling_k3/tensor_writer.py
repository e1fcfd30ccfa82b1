"""Writing safetensors directories so that a reader sees all of it or nothing.

A file is written beside its place, flushed to the disk, and renamed. Tensors are produced one at a time, so memory is
bounded by the largest.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .systems import sync_directory
from .tensor_files import DTYPE_NAMES, DTYPES, INDEX_NAME, SINGLE_NAME

PARTIAL = ".partial"
#: What the name of a folder begins with in which a save stands until it is complete.
STAGING = ".saving-"


@dataclass(frozen=True)
class Item:
    """A tensor to write.

    Args:
        name: in the file.
        dtype: the format's name of its number format, such as "BF16".
        shape: its dimensions.
        make: returns the tensor; called once, when it is its turn.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Item":
        """An item for a tensor at hand."""
        return cls(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), lambda: tensor)


def split_items(items: Iterable[Item], max_bytes: int) -> list[list[Item]]:
    """Cut a sequence into shards of at most `max_bytes`; a larger tensor gets a shard of its own."""
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return shards


def shard_name(number: int, count: int, variant: str | None = None, digits: int = 5) -> str:
    """`model-00001-of-00003.safetensors`; the release writes the count with six digits."""
    stem = "model" if variant is None else f"model.{variant}"
    return f"{stem}-{number:05d}-of-{count:0{digits}d}.safetensors"


def write_shard(
    path: Path,
    items: Sequence[Item],
    metadata: dict[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
    tap: Callable[[bytes | memoryview], None] | None = None,
) -> None:
    """Write one file; it appears under its name when it is complete and on the disk.

    Args:
        path: where to.
        items: its tensors, laid out in the order that aligns them: wide number formats first.
        metadata: free text for the header.
        progress: called with the number of bytes after each tensor.
        tap: called with all bytes of the file, piece by piece as they are written, such as for a checksum.

    Raises:
        ValueError: a tensor that is not what its item said.
    """
    ordered = sorted(items, key=lambda item: (-DTYPES[item.dtype].itemsize, item.name))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for item in ordered:
        end = offset + item.nbytes
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "wb", buffering=1 << 20) as file:

        def put(piece: bytes | memoryview) -> None:
            file.write(piece)
            if tap is not None:
                tap(piece)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for item in ordered:
            tensor = item.make().detach()
            if tuple(tensor.shape) != item.shape or DTYPE_NAMES.get(tensor.dtype) != item.dtype:
                raise ValueError(
                    f"{item.name} came as {tensor.dtype} {tuple(tensor.shape)}, announced {item.dtype} {item.shape}"
                )
            if item.nbytes:
                plain = tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8)
                put(memoryview(plain.numpy()))
            if progress is not None:
                progress(item.nbytes)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)


def write_index(path: Path, shards: dict[str, Sequence[Item]], **metadata: object) -> None:
    """Write the index of a sharded checkpoint: which tensor stands in which file, and the total size."""
    weight_map = {item.name: file for file, items in shards.items() for item in items}
    total = sum(item.nbytes for items in shards.values() for item in items)
    content = {
        "metadata": {**metadata, "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_checkpoint(
    directory: Path,
    items: Sequence[Item],
    max_bytes: int,
    *,
    variant: str | None = None,
    digits: int = 5,
    progress: Callable[[int], None] | None = None,
    **metadata: object,
) -> None:
    """Write tensors as one file, or as shards with an index that comes last.

    Args:
        directory: exists.
        items: all tensors.
        max_bytes: of one file.
        variant, digits: parts of the file names, see `shard_name`.
        progress: see `write_shard`.
        metadata: further entries of the index.
    """
    shards = split_items(items, max_bytes)
    if len(shards) == 1:
        name = SINGLE_NAME if variant is None else SINGLE_NAME.replace("model.", f"model.{variant}.")
        write_shard(directory / name, shards[0], {"format": "pt"}, progress)
        return
    named = {shard_name(i + 1, len(shards), variant, digits): shard for i, shard in enumerate(shards)}
    for name, shard in named.items():
        write_shard(directory / name, shard, {"format": "pt"}, progress)
    index = INDEX_NAME if variant is None else INDEX_NAME.replace("model.", f"model.{variant}.")
    write_index(directory / index, named, **metadata)
