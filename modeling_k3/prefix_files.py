"""Blocks of known prefixes, and the file they are stored in.

One safetensors file: tensors `<block>.tokens`, `<block>.latents.<layer>.<part>`, `<block>.states.<layer>.<part>`. Its
header says which model they belong to, which block follows which, and which tensors of which shape each block has, so
that a file that lost some is refused.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_MARK = "k3_prefix_cache"


class Block(NamedTuple):
    """What one block adds.

    Args:
        parent: key of the block before, `b""` for none.
        tokens: [block_size] int64 on the CPU.
        latents: for each MLA layer latents [1, 1, block_size, kv_lora_rank] and shared parts [1, 1, block_size, rope].
        states: for each KDA layer at the end of the block three windows and the state, each with B = 1.
    """

    parent: bytes
    tokens: Tensor
    latents: list[tuple[Tensor, ...]]
    states: list[tuple[Tensor, ...]]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name."""
        yield "tokens", self.tokens
        for kind in ("latents", "states"):
            for layer, group in enumerate(getattr(self, kind)):
                yield from ((f"{kind}.{layer}.{part}", tensor) for part, tensor in enumerate(group))

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for _, x in self.named())


def block_key(parent: bytes, tokens: Tensor) -> bytes:
    """Key of the block with these tokens (int64 on the CPU) behind the block `parent`."""
    return hashlib.blake2b(parent + tokens.numpy().tobytes(), digest_size=16).digest()


def write_blocks(path: str | PathLike, blocks: Mapping[bytes, Block], fingerprint: str) -> None:
    """Write blocks as one file, whole or not at all; a block stands before the one that it follows.

    Args:
        path: the file; replaced if it is there. Several threads or processes may write it: the last one stays.
        blocks: at least one, by key.
        fingerprint: of the model whose states they hold.
    """
    order = {key: index for index, key in enumerate(blocks)}
    first = next(iter(blocks.values()))
    about = {
        "fingerprint": fingerprint,
        "block_size": len(first.tokens),
        "parents": [order.get(block.parent, -1) for block in blocks.values()],
        "shapes": {name: list(tensor.shape) for name, tensor in first.named()},
    }
    tensors = {
        f"{index}.{name}": tensor.contiguous().cpu()
        for index, block in enumerate(blocks.values())
        for name, tensor in block.named()
    }
    partial = f"{fspath(path)}.{uuid.uuid4().hex}.partial"
    try:
        save_file(tensors, partial, metadata={_MARK: json.dumps(about)})
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


class BlockFile:
    """An open file of blocks, complete as far as its header and its list of tensors say; see `open_blocks`."""

    def __init__(self, path: str, file: Any) -> None:
        self._path, self._file = path, file
        about = json.loads((file.metadata() or {}).get(_MARK, "null"))
        if about is None:
            raise ValueError(f"{path} is not a prefix cache: its header does not say so")
        try:
            self.fingerprint, self.block_size = str(about["fingerprint"]), int(about["block_size"])
            self.parents = [int(parent) for parent in about["parents"]]
            self._shapes = {str(name): tuple(shape) for name, shape in about["shapes"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error!r} in its header's {_MARK}") from None
        self._check()

    def _check(self) -> None:
        for index, parent in enumerate(self.parents):
            if parent != -1 and not index < parent < len(self.parents):
                raise ValueError(f"{self._path} is damaged: block {index} stands behind the block it follows")
        wanted = {f"{i}.{name}": shape for i in range(len(self.parents)) for name, shape in self._shapes.items()}
        found = set(self._file.keys())
        odd = sorted(found ^ wanted.keys())
        if odd:
            raise ValueError(
                f"{self._path} is damaged: tensor {odd[0]} {'should not be there' if odd[0] in found else 'is missing'}"
            )
        if self._shapes.get("tokens") != (self.block_size,):
            raise ValueError(f"{self._path} is damaged: blocks of {self.block_size} with {self._shapes.get('tokens')}")
        for name, shape in wanted.items():
            stored = tuple(self._file.get_slice(name).get_shape())
            if stored != shape:
                raise ValueError(f"{self._path} is damaged: tensor {name} has shape {stored}; it was saved as {shape}")

    def blocks(self) -> Iterator[tuple[bytes, Block]]:
        """Key and block, from the last of the file to the first: each behind the one that it follows."""
        keys, names = {-1: b""}, list(self._shapes)
        for index in reversed(range(len(self.parents))):
            held = {name: self._file.get_tensor(f"{index}.{name}") for name in names}
            parent = keys[self.parents[index]]
            keys[index] = block_key(parent, held["tokens"])
            yield keys[index], Block(parent, held["tokens"], _groups(held, "latents"), _groups(held, "states"))


def _groups(held: Mapping[str, Tensor], kind: str) -> list[tuple[Tensor, ...]]:
    """The tensors `<kind>.<layer>.<part>`, in the order in which they were saved."""
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in held.items():
        if name.startswith(f"{kind}."):
            groups.setdefault(name.split(".")[1], []).append(tensor)
    return [tuple(group) for group in groups.values()]


@contextmanager
def open_blocks(path: str | PathLike) -> Iterator[BlockFile]:
    """Open what `write_blocks` wrote.

    Raises:
        ValueError: not such a file, or a damaged one; the message names the tensor.
    """
    try:
        with safe_open(fspath(path), framework="pt") as file:
            yield BlockFile(fspath(path), file)
    except SafetensorError as error:
        raise ValueError(f"{fspath(path)} is damaged, or no safetensors file: {error}") from None
