"""safetensors files as read-only byte ranges: checked headers, zero-copy views on our own maps, plain reads.

The library maps a file privately and writable with its whole size accounted for, which fails once files outgrow
memory, and lays out one Python object for each tensor, of which the release has half a million. Here a file is mapped

* shared and read-only, for experts: nothing can change them and nothing is ever charged as memory;
* privately and writable without reservation, for parameters: training writes to the touched pages' copies, never to
  the file.

Format: 8 bytes little-endian header length, a JSON header, then the data. Every range is checked before it is used.

A file is opened once and read through that one descriptor. Another file put in its place (a rename, as every careful
tool writes) is therefore never seen: the model keeps the bytes it was loaded from. A file written to in place, or cut,
has another size or time of change, and the next read, new map or forward that uses its experts is an error. Not seen:
a writer that sets the time back or writes through its own map before the system notes the time, a change in the middle
of a forward (cut, the system ends the process with SIGBUS), one below parameters that are views on the file, and a
download that made the whole file first and did not finish: what was never written reads as zeros.
"""

import json
import math
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .systems import open_to_read, read_at

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

#: Number formats by their names in a header.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000
#: Bytes read at a time on the way into the page cache.
_PIECE = 1 << 20
# Not in every version's mmap module; Linux only. Elsewhere a private map reserves nothing anyway.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class Entry(NamedTuple):
    """One tensor of a file: number format, shape, and its bytes [start, stop) counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.stop - self.start

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch number format."""
        return DTYPES[self.dtype]


class TensorFile:
    """A safetensors file. Opening reads and checks the header; maps are made when first used.

    Args:
        path: the file.
        stamp: its size in bytes and time of change in ns as they were seen earlier; None to take what is there now.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is truncated, too long, not the one that was seen, or its header is not what the format
            says.
    """

    def __init__(self, path: str | os.PathLike, stamp: tuple[int, int] | None = None) -> None:
        self.path = Path(path)
        if stamp is None and self.path.exists():
            stamp = _stamp(os.stat(self.path))
        self._stamp = stamp

    @cached_property
    def _handle(self) -> int:
        handle = open_to_read(self.path)
        weakref.finalize(self, os.close, handle)
        self._stamp = self._stamp or _stamp(os.fstat(handle))
        return handle

    def check_unchanged(self) -> None:
        """Refuse a file that is not the one that was seen first.

        Raises:
            ValueError: it has another size or time of change.
        """
        found = _stamp(os.fstat(self._handle))
        if found != self._stamp:
            raise ValueError(
                f"{self.path} was changed after it was first looked at: (bytes, ns) {self._stamp} then, {found} now; "
                "load the model again"
            )

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The tensors by name."""
        return self._header[0]

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The header's free text entries."""
        return self._header[1]

    @cached_property
    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        self.check_unchanged()
        return _read_header(self.path, self._handle)

    def forget_header(self) -> None:
        """Drop the list of tensors; it is read again when asked for."""
        for name in ("entries", "metadata", "_header"):
            self.__dict__.pop(name, None)

    @cached_property
    def _fixed(self) -> mmap.mmap:
        self.check_unchanged()
        return mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ)

    @cached_property
    def _flat(self) -> Tensor:
        with warnings.catch_warnings():
            # torch knows no read-only tensors and warns that writing would be undefined; nobody writes to experts.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._fixed, dtype=torch.uint8)

    @cached_property
    def _private(self) -> mmap.mmap | None:
        self.check_unchanged()
        try:
            if not _NORESERVE:
                return mmap.mmap(self._handle, 0, access=mmap.ACCESS_COPY)
            flags = mmap.MAP_PRIVATE | _NORESERVE
            return mmap.mmap(self._handle, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            # A system that reserves memory for every writable map and has too little: copies then.
            return None

    def bytes_at(self, start: int, stop: int) -> Tensor:
        """A read-only view of bytes [start, stop), uint8. Writing to it ends the process."""
        return self._flat[start:stop]

    def fixed_view(self, entry: Entry) -> Tensor:
        """A read-only zero-copy tensor; a copy where the file is not aligned to the number format."""
        raw = self.bytes_at(entry.start, entry.stop)
        if entry.start % entry.torch_dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.torch_dtype).view(entry.shape)

    def view(self, entry: Entry) -> Tensor:
        """A zero-copy tensor that may be written to (the file never changes); a copy where that is impossible."""
        self.check_unchanged()
        dtype = entry.torch_dtype
        if entry.nbytes == 0 or entry.start % dtype.itemsize or self._private is None:
            return self.read(entry)
        count = entry.nbytes // dtype.itemsize
        return torch.frombuffer(self._private, dtype=dtype, count=count, offset=entry.start).view(entry.shape)

    def read(self, entry: Entry) -> Tensor:
        """A copy in ordinary memory, read without mapping the file."""
        out = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
        self.read_into(entry, out)
        return out

    def read_into(self, entry: Entry, out: Tensor) -> None:
        """Fill `out` (contiguous, on the CPU, same number of bytes) without mapping the file.

        Raises:
            ValueError: another size, or the file was changed.
        """
        if out.nbytes != entry.nbytes or not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError(f"out has {out.nbytes} bytes on {out.device}; needed are {entry.nbytes} contiguous on cpu")
        self.check_unchanged()
        if entry.nbytes:
            target = memoryview(out.detach().reshape(-1).view(torch.uint8).numpy())
            _read_at(self.path, self._handle, entry.start, target)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Check that the file is what it was, and ask the system to bring byte ranges into memory in the background."""
        self.check_unchanged()
        page = mmap.PAGESIZE
        for start, stop in ranges:
            first = start // page * page
            if hasattr(mmap, "MADV_WILLNEED"):
                self._fixed.madvise(mmap.MADV_WILLNEED, first, stop - first)

    def load(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Check that the file is what it was, and bring byte ranges into the page cache before returning."""
        self.check_unchanged()
        # Read rather than touched on the map: a bad disk is an error then, and other threads run meanwhile.
        piece = memoryview(bytearray(_PIECE))
        if hasattr(os, "posix_fadvise"):
            # Otherwise the system reads on beyond what was asked for, here into experts that nobody uses.
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)
        for start, stop in ranges:
            for first in range(start, stop, _PIECE):
                _read_at(self.path, self._handle, first, piece[: min(_PIECE, stop - first)])

    def drop(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take the whole pages in byte ranges out of memory; who looks at them again makes the system read them."""
        page = mmap.PAGESIZE
        for start, stop in ranges:
            first, last = -(-start // page) * page, stop // page * page
            if first < last and hasattr(mmap, "MADV_DONTNEED"):
                self._fixed.madvise(mmap.MADV_DONTNEED, first, last - first)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self._handle, first, last - first, os.POSIX_FADV_DONTNEED)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorFile":
        # A file is not copied with the model that looks into it.
        return self

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, int] | None]]:
        return TensorFile, (str(self.path), self._stamp)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _read_at(path: Path, handle: int, start: int, target: bytearray | memoryview) -> None:
    view, done = memoryview(target), 0
    while done < len(view):
        count = read_at(path, handle, start + done, view[done:])
        if not count:
            raise ValueError(f"{path} is truncated: it ends at byte {start + done}, inside what was announced")
        done += count


def _read_header(path: Path, handle: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read and check the header of one open file."""
    size = os.fstat(handle).st_size
    prefix = bytearray(8)
    length = int.from_bytes(prefix, "little") if read_at(path, handle, 0, memoryview(prefix)) == 8 else size
    if length > min(_MAX_HEADER, size - 8):
        raise ValueError(f"{path} is truncated or no safetensors file: {size} bytes, header of {length} announced")
    raw = bytearray(length)
    _read_at(path, handle, 8, raw)
    try:
        header = json.loads(raw, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ValueError(f"{path}: the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a {type(header).__name__}; allowed is an object")
    metadata = header.pop("__metadata__", {})
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(f"{path}: tensor {name!r} starts at byte {entry.start}, the one before ends at {end}")
        end = entry.stop
    if end != size:
        what = "truncated" if end > size else "longer than its header says"
        raise ValueError(f"{path} is {what}: {size} bytes, the tensors end at byte {end}")
    return entries, metadata


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:
    """Check one header entry and count its offsets from the start of the file."""
    try:
        dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{path}: tensor {name!r} has no dtype, shape and pair of data_offsets") from None
    if dtype not in DTYPES:
        raise ValueError(f"{path}: tensor {name!r} has dtype {dtype!r}; allowed are {sorted(DTYPES)}")
    numbers = (*shape, start, stop)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{path}: tensor {name!r} has shape {list(shape)} and data_offsets {[start, stop]}")
    if stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{path}: tensor {name!r}, {dtype} {list(shape)}, does not fill bytes {start} to {stop}")
    return Entry(dtype, shape, base + start, base + stop)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name of a sharded checkpoint, every file a safetensors file inside the directory.

    Raises:
        ValueError: not an index, or an entry that is no safetensors file or leads out of the directory.
    """
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
        weight_map = content["weight_map"]
        pairs = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a checkpoint index with a weight_map: {error}") from None
    for file in {file for _, file in pairs}:
        parts = Path(file).parts if isinstance(file, str) else ()
        leaves = not parts or os.path.isabs(file) or ".." in parts or "\\" in file or "\0" in file
        if leaves or not file.endswith(".safetensors"):
            raise ValueError(
                f"{path} names the file {file!r}; allowed are .safetensors files inside the directory of the index"
            )
    return weight_map
