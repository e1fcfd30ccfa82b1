"""A conversion as a job on disk: planned first, then file by file, resumable after a kill at any moment.

Everything is written into `<target>.partial`. A file counts there when it is complete, on the disk, and noted in the
record with its size and CRC-32, which is taken while it is written; a later run with the same plan keeps it. The last
step renames the folder, so a target is complete or absent. The same command on a finished target compares every file
with the record. The source is only read.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from modeling_k3.systems import lock_file, sync_directory
from modeling_k3.tensor_files import INDEX_NAME, SINGLE_NAME
from modeling_k3.tensor_writer import PARTIAL, Item, shard_name, write_index, write_shard, write_text

RECORD = "conversion.json"
#: What a run leaves that was killed before it had written the record.
_STARTED = {RECORD + PARTIAL}
_SPARE = 64 << 20
_PIECE = 1 << 24

Progress = Callable[[int, int], None]


@dataclass
class Job:
    """What a conversion will write.

    Args:
        target: the folder that will appear.
        shards: the tensors of each file, in order.
        texts: small files by name, written as they are.
        copies: files by name, copied from where they are.
        made: files by name, made last by a function of their path, from the folder that they stand in.
        identity: whatever else decides the result (source files, options); a resumed run must have the same.
        digits: of the count in the shards' names.
    """

    target: Path
    shards: list[list[Item]]
    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    made: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    identity: dict[str, object] = field(default_factory=dict)
    digits: int = 5

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.nbytes for shard in self.shards for item in shard)

    @property
    def folder(self) -> Path:
        """Where the job is written until it is complete."""
        return self.target.with_name(self.target.name + ".partial")

    @cached_property
    def weights(self) -> dict[str, list[Item]]:
        """The shards by file name."""
        if len(self.shards) == 1:
            return {SINGLE_NAME: self.shards[0]}
        count = len(self.shards)
        return {shard_name(i + 1, count, digits=self.digits): shard for i, shard in enumerate(self.shards)}

    @property
    def files(self) -> list[str]:
        """The names of all files but the record, in the order of writing."""
        index = [INDEX_NAME] if len(self.shards) > 1 else []
        return [*self.weights, *self.copies, *self.texts, *index, *self.made]

    def fingerprint(self) -> str:
        """Two jobs with the same fingerprint write the same bytes."""
        others = [self.identity, self.texts, sorted(self.copies), sorted(self.made)]
        digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode())
        for name, items in self.weights.items():
            digest.update(name.encode())
            for item in items:
                digest.update(f"{item.name} {item.dtype} {item.shape}\n".encode())
        return digest.hexdigest()


def identify(paths: Sequence[Path]) -> list[list[object]]:
    """What tells source files apart from others: name, size and time of the last change."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def run_job(job: Job, progress: Progress | None = None) -> Path:
    """Write what is not written yet, and put the result in its place.

    A target that this job has finished before is read and compared with the record. What is missing there is written
    again; what is there and differs stays as it is and is an error.

    Args:
        job: the plan.
        progress: called with (bytes done, bytes in all) after every tensor, and once for what was already there.

    Returns:
        The target.

    Raises:
        FileExistsError: the target is there and is not the result of this very job, or not any more; or another
            process works on it.
        OSError: not enough room.
    """
    mark = job.fingerprint()
    job.target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(job.target):
        if job.target.exists():
            found = _record_of(job.target)
            if found is None or found["fingerprint"] != mark or found["files"].keys() != set(job.files):
                raise FileExistsError(f"{job.target} exists already; remove it or choose another target")
            _check_unchanged(job.target, found["files"], progress)
            if any(not (job.target / name).is_file() for name in job.files):
                _write(job, job.target, found, progress)
            return job.target
        found = _record_of(job.folder)
        if found is None and job.folder.exists() and {path.name for path in job.folder.iterdir()} - _STARTED:
            raise FileExistsError(f"{job.folder} exists and is not of a conversion; remove it or choose another target")
        if found is None or found["fingerprint"] != mark:
            shutil.rmtree(job.folder, ignore_errors=True)
            found = {"tool": "k3 convert", "fingerprint": mark, "files": {}}
        _write(job, job.folder, found, progress)
        _sweep(job)
        os.replace(job.folder, job.target)
        sync_directory(job.target.parent)
    return job.target


def _write(job: Job, folder: Path, record: dict[str, Any], progress: Progress | None) -> None:
    """Write the files that are not noted in the record, or not there any more, and note them."""
    done = {name for name, noted in record["files"].items() if _size(folder / name) == noted["bytes"]}
    todo = [name for name in job.files if name not in done]
    total = job.nbytes
    left = sum(item.nbytes for name in todo for item in job.weights.get(name, ()))
    room = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if left + _SPARE > room:
        raise OSError(
            f"{left / 1e9:.2f} GB are to be written to {folder.parent}, where {room / 1e9:.2f} GB are free; "
            f"{_SPARE / 1e9:.2f} GB must stay free"
        )
    folder.mkdir(exist_ok=True)
    _note(folder, record)

    def advance(count: int) -> None:
        nonlocal left
        left -= count
        if progress is not None:
            progress(total - left, total)

    advance(0)
    for name in todo:
        record["files"][name] = _write_file(job, folder / name, advance)
        _note(folder, record)


def _note(folder: Path, record: dict[str, Any]) -> None:
    write_text(folder / RECORD, json.dumps(record, indent=2, sort_keys=True) + "\n")


def _write_file(job: Job, path: Path, advance: Callable[[int], None]) -> dict[str, Any]:
    """Write one file; returns what the record says of it."""
    if path.name in job.weights:
        digest = _Digest()
        write_shard(path, job.weights[path.name], {"format": "pt"}, advance, tap=digest.add)
        return digest.noted()
    if path.name in job.copies:
        _copy(job.copies[path.name], path)
    elif path.name in job.texts:
        write_text(path, job.texts[path.name])
    elif path.name in job.made:
        job.made[path.name](path)
    else:
        write_index(path, job.weights)
    return _read_digest(path)


class _Digest:
    """Size and CRC-32 of what is added: against decay and accidents, fast enough not to slow writing down."""

    def __init__(self) -> None:
        self.size = self.crc = 0

    def add(self, piece: bytes | memoryview) -> None:
        self.size += len(piece)
        self.crc = zlib.crc32(piece, self.crc)

    def noted(self) -> dict[str, Any]:
        return {"bytes": self.size, "crc32": f"{self.crc:08x}"}


def _read_digest(path: Path, advance: Callable[[int], None] | None = None) -> dict[str, Any]:
    digest = _Digest()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.add(piece)
            if advance is not None:
                advance(len(piece))
    return digest.noted()


def _check_unchanged(folder: Path, noted: dict[str, dict[str, Any]], progress: Progress | None) -> None:
    """Refuse a finished target with files that are not as they were written. Missing ones can be written again."""
    present = {name: each for name, each in noted.items() if (folder / name).is_file()}
    total, done = sum(each["bytes"] for each in present.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    changed = [
        name
        for name, each in present.items()
        if _size(folder / name) != each["bytes"] or _read_digest(folder / name, advance) != each
    ]
    if changed:
        raise FileExistsError(
            f"{folder} is the result of this conversion, but {len(changed)} of its files are not as they were written: "
            f"{', '.join(changed[:5])}; remove these, and the same command writes only them again"
        )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keep other processes from writing `target`, whose folder is renamed meanwhile: the lock stands beside it."""
    path = target.with_name(target.name + ".lock")
    while True:
        with open(path, "w", encoding="utf-8") as lock:
            try:
                lock_file(lock.fileno())
            except BlockingIOError:
                raise FileExistsError(f"another process is writing {target}") from None
            # Whoever had it may have removed it after it was opened here: then it keeps nobody out.
            if _is_at(lock.fileno(), path):
                try:
                    yield
                finally:
                    # Windows removes no open file. Left there it keeps nobody out.
                    with suppress(PermissionError):
                        path.unlink()
                return


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _copy(source: Path, target: Path) -> None:
    partial = target.with_name(target.name + PARTIAL)
    shutil.copyfile(source, partial)
    with open(partial, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)


def _record_of(folder: Path) -> dict[str, Any] | None:
    """What the job that wrote a folder noted; None for anything else."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {"tool": "k3 convert", "fingerprint": record["fingerprint"], "files": dict(record.get("files", {}))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _sweep(job: Job) -> None:
    """Remove half-written files of a killed run: nothing but the result may be in the folder."""
    for path in job.folder.iterdir():
        if path.name not in (*job.files, RECORD):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
