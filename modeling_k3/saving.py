"""From parameters to files: released names, the layout that was read, one atomic step.

What a directory gets as config.json: a model that was read from the released layout writes the nested released
dictionary (outer `kimi_k3`, its `text_config`, the quantisation block at the level where it stood; no `auto_map`) and
tensors with the prefix `language_model.`; every other model writes a flat dictionary (`model_type` "k3") and plain
names. `config.released_config = None` before saving asks for flat. Padding that was read is written back, experts are
written in the form they are in: MXFP4 bytes, or plain matrices after `dequantize=True`. A tensor that the file has in
another number format than the model goes back as it is stored, unless it was changed or the user chose a dtype.
"""

import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .checkpoint import TEXT_PREFIX, add_variant, canonical, is_vision
from .experts import iter_experts
from .load_plan import Layout
from .systems import OPENS_FOLDERS, lock_file, sync_directory
from .tensor_files import DTYPE_NAMES, DTYPES, INDEX_NAME, SINGLE_NAME
from .tensor_writer import STAGING, Item

logger = logging.get_logger(__name__)

_WEIGHTS = re.compile(r"model(\..+)?(-\d{5}-of-\d{5,6})?\.safetensors(\.index\.json)?")


def layout_to_write(model: nn.Module, layout: Layout | None) -> Layout:
    """How the names will be spelled.

    Args:
        model: what is saved; its config decides between flat and released.
        layout: what was read, or None for a model that was built in code.
    """
    is_nested = model.config.released_config is not None
    read = layout if layout is not None else Layout(prefix=TEXT_PREFIX if is_nested else "", decoder="")
    is_decoder = model.base_model is model
    prefix = "" if read.is_nested and not is_nested else read.prefix
    decoder = read.decoder if is_decoder else "model."
    is_same = (prefix, decoder) == (read.prefix, read.decoder)
    return replace(read, prefix=prefix, decoder=decoder, odd=read.odd if is_same else {})


def released_items(
    model: nn.Module, tensors: Mapping[str, Tensor], layout: Layout, disk: Mapping[str, Tensor]
) -> Iterator[Item]:
    """Yield every tensor of a state dict under its name on disk.

    Args:
        model: whose names the state dict has.
        tensors: the state dict; entries on the meta device are taken from `disk`.
        layout: spelling and padding.
        disk: parameters that a device map left on disk.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if layout.tied is None:
        spared = set(tied)
    else:
        spared = {name for name in (*tied, *tied.values()) if canonical(name) in layout.tied}
    stacks = {f"{name}.": module for name, module in iter_experts(model)}
    for prefix, module in stacks.items():
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for name, matrix in module.released(own, prefix):
            make = _from_stack(module, prefix, name, disk) if matrix.is_meta else (lambda matrix=matrix: matrix)
            item = Item(layout.spell(canonical(name)), DTYPE_NAMES[matrix.dtype], tuple(matrix.shape), make)
            yield _as_stored(item, layout, matrix.is_meta)
    for name, tensor in tensors.items():
        if name in spared or any(name.startswith(prefix) for prefix in stacks):
            continue
        shape = layout.padded.get(canonical(name), tuple(tensor.shape))
        make = _padded(name, tensor, shape, disk)
        item = Item(layout.spell(canonical(name)), DTYPE_NAMES[tensor.dtype], shape, make)
        yield _as_stored(item, layout, tensor.is_meta)


def _as_stored(item: Item, layout: Layout, is_on_disk: bool) -> Item:
    """The file's own tensor in the place of one that was rounded or widened from it and never changed since."""
    (file, entry), dtype = layout.recast.get(canonical(item.name), ((None, None), None))
    if file is None or not layout.keeps_dtypes or DTYPES[item.dtype] != dtype:
        return item
    if not is_on_disk:
        read, own = file.read(entry).to(dtype), item.make().detach().to("cpu").contiguous()
        # By bytes: not-a-number equals nothing.
        if not torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (read, own))):
            return item
    return Item(item.name, entry.dtype, entry.shape, lambda: file.read(entry))


def report_recast(items: Sequence[Item], layout: Layout) -> None:
    """Say in one line that tensors are written in another number format than the file has."""
    stored = {item.name: layout.recast.get(canonical(item.name)) for item in items}
    others = [item for item in items if stored[item.name] and item.dtype != stored[item.name][0][1].dtype]
    if others:
        logger.warning(
            f"{len(others)} tensors are saved in another number format than they were read in "
            f"({others[0].name} as {others[0].dtype}, ...): dtype was chosen while loading, or they were changed"
        )


def _padded(name: str, tensor: Tensor, shape: tuple[int, ...], disk: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        value = (disk[name].to(tensor.dtype) if tensor.is_meta else tensor).detach()
        if tuple(value.shape) == shape:
            return value
        return torch.cat([value, value.new_zeros(math.prod(shape) - value.shape[0])]).reshape(shape)

    return make


def _from_stack(module: Any, prefix: str, wanted: str, disk: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """One matrix of a stack that stays on disk. The stack is made for the matrix: slow, small."""

    def make() -> Tensor:
        for stack in [name for name in disk if name.startswith(prefix)]:
            for name, matrix in module.released({stack: disk[stack]}, prefix):
                if name == wanted:
                    return matrix
        raise ValueError(f"{wanted!r} is on the meta device and not on disk: there is nothing to save")

    return make


def vision_items(layout: Layout) -> Iterator[Item]:
    """Yield the vision and projector tensors of the checkpoint that was read, untouched.

    Raises:
        ValueError: nothing was read, or it had none.
    """
    names = [] if layout.checkpoint is None else [name for name in layout.checkpoint.where if is_vision(name)]
    if not names:
        raise ValueError("vision=True, but the checkpoint that was loaded has no vision tensors to carry over")
    for name, (file, entry) in layout.checkpoint.locate(names)[0].items():
        yield Item(name, entry.dtype, entry.shape, lambda file=file, entry=entry: file.view(entry))


def check_nothing_is_lost(target: Path, layout: Layout, items: Sequence[Item], depth: int) -> None:
    """Refuse to put a part of the checkpoint in the place of the whole that was read.

    Raises:
        ValueError: `target` is the directory that was read, and vision tensors or layers beyond `depth` would go.
    """
    if layout.checkpoint is None:
        return
    if target.resolve() not in {Path(file.path).resolve().parent for file in layout.checkpoint.files}:
        return
    written = {item.name for item in items}
    deeper = [re.search(r"\.layers\.(\d+)\.", name) for name in layout.checkpoint.where]
    beyond = {match.string for match in deeper if match is not None and int(match[1]) >= depth}
    lost = sorted(
        name for name in layout.checkpoint.where if name not in written and (is_vision(name) or name in beyond)
    )
    if lost:
        raise ValueError(
            f"save_directory={str(target)!r} is where the model was read from, and {len(lost)} tensors there would be "
            f"lost: {', '.join(lost[:3])}, ...; allowed are another directory, or vision=True with all layers loaded"
        )


class Staging:
    """A hidden folder inside the target; `commit` moves its files into place, weights last.

    A reader sees the old checkpoint, or none (an index or single file is the first thing to go and the last to appear),
    or the new one. Files that are mapped by a loaded model are replaced, never written to. The folder is locked while
    its process lives, so that the next save into the same target removes what a killed one left, and nothing else.
    """

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> "Staging":
        for left in self.target.glob(STAGING + "*"):
            lock = _lock(left)
            if lock is not None:
                _remove(left, lock)
        self.path = Path(tempfile.mkdtemp(prefix=f"{STAGING}{os.getpid()}-", dir=self.target))
        self._lock = _lock(self.path)
        return self

    def __exit__(self, *failure: object) -> None:
        _remove(self.path, self._lock)

    def commit(self, variant: str | None = None) -> None:
        """Move everything into place and remove what is left of an earlier checkpoint of the same variant."""
        single, index = (add_variant(name, variant) for name in (SINGLE_NAME, INDEX_NAME))
        new = sorted(path.name for path in self.path.iterdir())
        last = [name for name in new if name in (single, index)]
        old = [path.name for path in self.target.iterdir() if is_weights(path.name, variant)]
        # Gone before anything new appears: a new config beside old weights would load without a word.
        for name in (single, index):
            (self.target / name).unlink(missing_ok=True)
        sync_directory(self.target)
        for name in [name for name in new if name not in last] + last:
            self._replace(name)
        for name in old:
            if name not in new:
                (self.target / name).unlink(missing_ok=True)
        sync_directory(self.target)

    def _replace(self, name: str) -> None:
        source, target = self.path / name, self.target / name
        if source.is_dir() and target.is_dir():
            shutil.rmtree(target)
        os.replace(source, target)


def _lock(folder: Path) -> int | None:
    """Lock a folder until its descriptor is closed or the process ends; None where that is not to be had."""
    try:
        handle = os.open(folder, os.O_RDONLY) if OPENS_FOLDERS else os.open(_beside(folder), os.O_RDWR | os.O_CREAT)
    except OSError:
        return None
    try:
        lock_file(handle)
    except OSError:
        # Another process saves there, or a file system without locks, where nothing can be said to be left over.
        os.close(handle)
        return None
    return handle


def _beside(folder: Path) -> Path:
    """The file that is locked for a folder where folders are not: it neither keeps the folder nor is moved with it."""
    return folder.with_name(f".lock{folder.name}")


def _remove(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)
    if not OPENS_FOLDERS:
        with suppress(OSError):
            _beside(folder).unlink()


def is_weights(name: str, variant: str | None) -> bool:
    """Whether a file holds the weights of a variant, or is their index."""
    found = _WEIGHTS.fullmatch(name)
    return found is not None and found[1] == (None if variant is None else f".{variant}")
