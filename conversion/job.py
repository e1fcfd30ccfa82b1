"""A conversion as a job on disk: planned first, then shard by shard, resumable after a kill at any moment.

Everything is written into `<target>.partial`. A shard appears there under its name when it is complete and on the
disk; a later run with the same plan keeps it. The last step renames the folder, so a target is complete or absent.
The source is only read.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from modeling_k3.tensor_files import INDEX_NAME, SINGLE_NAME, TensorFile
from modeling_k3.tensor_writer import Item, shard_name, sync_directory, write_index, write_shard, write_text

RECORD = "conversion.json"
_LOCK = ".lock"
_SPARE = 64 << 20


@dataclass
class Job:
    """What a conversion will write.

    Args:
        target: the folder that will appear.
        shards: the tensors of each file, in order.
        texts: small files by name, written as they are.
        copies: files by name, copied from where they are.
        identity: whatever else decides the result (source files, options); a resumed run must have the same.
        digits: of the count in the shards' names.
        finish: called with the complete folder before it is put in its place; may add files.
    """

    target: Path
    shards: list[list[Item]]
    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    identity: dict[str, object] = field(default_factory=dict)
    digits: int = 5
    finish: Callable[[Path], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.nbytes for shard in self.shards for item in shard)

    @property
    def folder(self) -> Path:
        """Where the job is written until it is complete."""
        return self.target.with_name(self.target.name + ".partial")

    def files(self) -> dict[str, list[Item]]:
        """The shards by file name."""
        if len(self.shards) == 1:
            return {SINGLE_NAME: self.shards[0]}
        count = len(self.shards)
        return {shard_name(i + 1, count, digits=self.digits): shard for i, shard in enumerate(self.shards)}

    def fingerprint(self) -> str:
        """Two jobs with the same fingerprint write the same bytes."""
        digest = hashlib.sha256(json.dumps([self.identity, self.texts, sorted(self.copies)], sort_keys=True).encode())
        for name, items in self.files().items():
            digest.update(name.encode())
            for item in items:
                digest.update(f"{item.name} {item.dtype} {item.shape}\n".encode())
        return digest.hexdigest()


def identify(paths: Sequence[Path]) -> list[list[object]]:
    """What tells source files apart from others: name, size and time of the last change."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def run_job(job: Job, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write what is not written yet, and put the result in its place.

    Args:
        job: the plan.
        progress: called with (bytes done, bytes in all) after every tensor, and once for what was already there.

    Returns:
        The target.

    Raises:
        FileExistsError: the target is there and is not the result of this very job, or another process works on it.
        OSError: not enough room.
    """
    mark = job.fingerprint()
    if job.target.exists():
        if _mark_of(job.target) == mark:
            return job.target
        raise FileExistsError(f"{job.target} exists already; remove it or choose another target")
    job.target.parent.mkdir(parents=True, exist_ok=True)
    job.folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        lock = stack.enter_context(open(job.folder / _LOCK, "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"another process is writing {job.folder}") from None
        if _mark_of(job.folder) != mark:
            _clear(job.folder)
            write_text(job.folder / RECORD, json.dumps({"tool": "k3 convert", "fingerprint": mark}, indent=2) + "\n")
        _write(job, progress)
        (job.folder / _LOCK).unlink()
        os.replace(job.folder, job.target)
        sync_directory(job.target.parent)
    return job.target


def _write(job: Job, progress: Callable[[int, int], None] | None) -> None:
    files = job.files()
    todo = {name: items for name, items in files.items() if not _is_complete(job.folder / name, items)}
    total, left = job.nbytes, sum(item.nbytes for items in todo.values() for item in items)
    room = shutil.disk_usage(job.folder).free
    if left + _SPARE > room:
        raise OSError(f"{left / 1e9:.2f} GB are to be written to {job.folder.parent}, which has {room / 1e9:.2f} GB")
    done = total - left

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    advance(0)
    for name, items in todo.items():
        write_shard(job.folder / name, items, {"format": "pt"}, advance)
    for name, source in job.copies.items():
        _copy(source, job.folder / name)
    for name, text in job.texts.items():
        write_text(job.folder / name, text)
    if len(files) > 1:
        write_index(job.folder / INDEX_NAME, files)
    _sweep(job)
    if job.finish is not None:
        job.finish(job.folder)


def _is_complete(path: Path, items: Sequence[Item]) -> bool:
    """Whether a shard of an earlier run is there, whole, with these tensors."""
    if not path.is_file():
        return False
    try:
        entries = TensorFile(path).entries
    except ValueError:
        return False
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
        item.name: (item.dtype, item.shape) for item in items
    }


def _copy(source: Path, target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.copyfile(source, partial)
    with open(partial, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)


def _mark_of(folder: Path) -> str | None:
    try:
        return json.loads((folder / RECORD).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _clear(folder: Path) -> None:
    """Remove what another plan left behind, but not the lock."""
    for path in folder.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sweep(job: Job) -> None:
    """Remove half-written files of a killed run: nothing but the result may be in the folder."""
    wanted = {*job.files(), *job.texts, *job.copies, RECORD, _LOCK}
    wanted |= {INDEX_NAME} if len(job.shards) > 1 else set()
    for path in job.folder.iterdir():
        if path.name not in wanted:
            path.unlink()
