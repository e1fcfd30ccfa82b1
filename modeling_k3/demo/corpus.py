"""The demo's text: which files are read, and which of them the model never sees in training."""

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import UserError
from .tokenizer import BOS_ID, EOS_ID

HELD_OUT_BYTES = 205_000
"""How much text is held out at least: the figure at the end is measured on all of it."""

MAX_BYTES = 256_000_000
"""Text beyond this is left out: the corpus lives in memory."""

# Not written by people as source text, or not present on every machine: installed packages, test suites (often packaged
# separately), generated character tables, the reference manual as one escaped string.
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

_FEW_FILES = 20
_PIECE_BYTES = 32_768


@dataclass(frozen=True)
class Document:
    """One file, or one piece of a large file: its name below the given path, and its UTF-8 bytes."""

    name: str
    data: bytes

    @property
    def rank(self) -> bytes:
        """A hash of the name alone. Sorting by it shuffles the same way on every machine."""
        return hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class Corpus:
    """Text split into a training part and a held-out part.

    Args:
        train: [n] int16, the training documents as ids, each `[BOS] bytes [EOS]`, one after the other.
        held_out: [m] int16, the same for the documents never trained on.
        train_bytes, held_out_bytes: text bytes in each part, control tokens not counted.
        train_files, held_out_files: names of the documents, in the order of the stream.
        skipped: files that could not be read or are not UTF-8 text.
        fingerprint: hash over both parts; equal fingerprints mean equal data in equal order.
        held_out_text: the held-out bytes themselves, for comparison with compressors.
    """

    train: Tensor
    held_out: Tensor
    train_bytes: int
    held_out_bytes: int
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    skipped: int
    fingerprint: str
    held_out_text: bytes


def load_corpus(
    paths: Sequence[Path] = (), *, held_out_bytes: int = HELD_OUT_BYTES, held_out_names: Collection[str] | None = None
) -> Corpus:
    """Read text and split it by a hash of the file names.

    Args:
        paths: files or directories; directories are searched for text files of any kind. Empty: the sources of the
            standard library of the running Python.
        held_out_bytes: documents are held out, in the order of their hashes, until they hold this many bytes.
        held_out_names: if given, the documents of these names instead: what a finished run held out, found again.

    Returns:
        The corpus. The same files give the same split and the same order, whatever the machine.

    Raises:
        UserError: a path does not exist, or there is too little text to hold out that much and train on as much again;
            none of the named documents is there.
    """
    found = [pair for path in paths for pair in _files_below(path)] if paths else list(_stdlib_files())
    documents, skipped = _read(found)
    if len(documents) < _FEW_FILES:
        documents = [piece for document in documents for piece in _cut(document)]
    # One huge file must not become the measure of everything, so such files are held out last.
    documents.sort(key=lambda document: (2 * len(document.data) > held_out_bytes, document.rank, document.name))

    if held_out_names is not None:
        parts = [[d for d in documents if (d.name in held_out_names) is wanted] for wanted in (False, True)]
        if not parts[1]:
            raise UserError(
                f"none of the {len(held_out_names)} held-out documents is among the {len(documents)} found."
            )
        return _assemble(*parts, skipped)
    held_out: list[Document] = []
    train: list[Document] = []
    size = 0
    for document in documents:
        if size < held_out_bytes:
            held_out.append(document)
            size += len(document.data)
        else:
            train.append(document)

    train_bytes = sum(len(document.data) for document in train)
    if size < held_out_bytes or train_bytes < held_out_bytes:
        where = ", ".join(str(path) for path in paths) or "the standard library"
        raise UserError(
            f"too little text in {where}: {size + train_bytes:,} bytes in {len(documents)} documents "
            f"({skipped} files skipped as unreadable or binary). Needed are {held_out_bytes:,} bytes to hold out and "
            f"at least as many to train on."
        )
    return _assemble(train, held_out, skipped)


def _assemble(train: list[Document], held_out: list[Document], skipped: int) -> Corpus:
    digest = hashlib.sha256()
    for part in (train, held_out):
        for document in part:
            digest.update(document.rank)
            digest.update(hashlib.sha256(document.data).digest())
        digest.update(b"|")
    return Corpus(
        train=_stream(train),
        held_out=_stream(held_out),
        train_bytes=sum(len(document.data) for document in train),
        held_out_bytes=sum(len(document.data) for document in held_out),
        train_files=tuple(document.name for document in train),
        held_out_files=tuple(document.name for document in held_out),
        skipped=skipped,
        fingerprint=digest.hexdigest(),
        held_out_text=b"".join(document.data for document in held_out),
    )


def _stream(documents: Iterable[Document]) -> Tensor:
    """Documents as one row of ids.

    A byte is its own id, so this is the tokenizer's text mode, only faster: control names in the text stay bytes.
    """
    begin, end = torch.tensor([BOS_ID], dtype=torch.int16), torch.tensor([EOS_ID], dtype=torch.int16)
    parts: list[Tensor] = []
    for document in documents:
        parts += [begin, torch.frombuffer(bytearray(document.data), dtype=torch.uint8).to(torch.int16), end]
    return torch.cat(parts)


def _stdlib_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for name, path in _walk(root, left_out=_STDLIB_LEFT_OUT):
        if path.suffix == ".py":
            yield name, path


def _files_below(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        yield from _walk(path)
    elif path.exists():
        yield path.name, path
    else:
        raise UserError(f"no such file or directory: {path}")


def _walk(root: Path, left_out: set[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """Every file below `root` as (name with forward slashes, path), in sorted order, hidden ones left out."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in left_out and not name.startswith((".", "__pycache__"))
        )
        for file in sorted(files):
            if not file.startswith("."):
                path = Path(folder, file)
                yield path.relative_to(root).as_posix(), path


def _read(found: Iterable[tuple[str, Path]]) -> tuple[list[Document], int]:
    """The readable text files among `found`, and how many were skipped. Files read twice count once."""
    documents: list[Document] = []
    seen: set[Path] = set()
    skipped = size = 0
    for name, path in found:
        real = path.resolve()
        if real in seen:
            continue
        seen.add(real)
        data = _text_bytes(path)
        if data is None or size + len(data) > MAX_BYTES:
            skipped += 1
        elif data:
            documents.append(Document(name, data))
            size += len(data)
    return documents, skipped


def _text_bytes(path: Path) -> bytes | None:
    """The file's bytes, or None if it is not a readable file of UTF-8 text."""
    try:
        # A pipe or a device would block or never end.
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        data = path.read_bytes()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if b"\0" in data else data


def _cut(document: Document) -> Iterator[Document]:
    """Cut into pieces of about 32 KiB, at line ends where possible: a few whole files could not be split fairly."""
    data, start, index = document.data, 0, 0
    while start < len(data):
        stop = min(start + _PIECE_BYTES, len(data))
        if stop < len(data):
            line_end = data.rfind(b"\n", start, stop) + 1
            stop = line_end if line_end > start else stop
            # Never cut a character in two: continuation bytes look like 10xxxxxx.
            while stop < len(data) and data[stop] & 0xC0 == 0x80:
                stop += 1
        yield Document(f"{document.name}#{index}", data[start:stop])
        start, index = stop, index + 1
