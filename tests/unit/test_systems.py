"""What differs between systems: locks, reading from a place, memory; and text files that say how they are encoded."""

import ast
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from modeling_k3 import systems
from modeling_k3.systems import lock_file, memory_bound, open_to_read, read_at
from tests.layout_source import Source, tracked_files


def test_a_lock_is_kept_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    lock_file(first)
    with pytest.raises(BlockingIOError):
        lock_file(second)
    os.close(first)
    lock_file(second)
    os.close(second)


def test_a_byte_is_locked_where_files_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of Windows, with what they raise there."""
    calls = []

    def locking(handle: int, mode: int, count: int) -> None:
        calls.append((mode, count, os.lseek(handle, 0, os.SEEK_CUR)))
        if len(calls) > 1:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(systems, "fcntl", None)
    monkeypatch.setattr(systems, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2), raising=False)
    with open(tmp_path / "lock", "w", encoding="utf-8") as file:
        file.write("text")
        file.flush()
        lock_file(file.fileno())
        with pytest.raises(BlockingIOError):
            lock_file(file.fileno())
    assert calls == [(2, 1, 0), (2, 1, 0)]


@pytest.mark.parametrize("has_preadv", [True, False])
def test_reading_from_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_preadv: bool) -> None:
    if not has_preadv:
        monkeypatch.delattr(os, "preadv")
    path = tmp_path / "file"
    path.write_bytes(b"0123\r\n\x1a789")
    handle = open_to_read(path)
    view = memoryview(bytearray(4))
    assert read_at(path, handle, 3, view) == 4 and bytes(view) == b"3\r\n\x1a"
    assert read_at(path, handle, 8, view) == 2 and bytes(view[:2]) == b"89"
    assert read_at(path, handle, 10, view) == 0
    os.close(handle)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 28 < memory_bound() < 1 << 50

    def tell(status: object) -> int:
        content = status._obj
        assert content[0] == 64
        content[1], content[2] = 16 << 30, 5 << 30
        return 1

    windll = SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=tell))
    monkeypatch.setattr(systems.ctypes, "windll", windll, raising=False)
    monkeypatch.delattr(os, "sysconf")
    assert memory_bound() == 5 << 30


def test_text_files_say_how_they_are_encoded() -> None:
    """Windows has another default."""
    found = []
    folders = ("modeling_k3/", "conversion/", "configuration/", "examples/")
    for name in [name for name in tracked_files() if name.startswith(folders) and name.endswith(".py")]:
        source = Source.read(name)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and _is_text(node) and "encoding" not in {k.arg for k in node.keywords}:
                found.append(source.finding(node.lineno, ast.unparse(node)))
    assert not found


def _is_text(call: ast.Call) -> bool:
    """Whether a call reads or writes text; what Linux alone has is ASCII."""
    text = ast.unparse(call)
    if text.startswith(("Path('/proc/", "Path('/sys/")):
        return False
    if isinstance(call.func, ast.Name) and call.func.id == "open":
        return "b" not in (ast.unparse(call.args[1]) if len(call.args) > 1 else "")
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_folders_are_flushed_where_they_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    systems.sync_directory(tmp_path)
    monkeypatch.setattr(systems, "OPENS_FOLDERS", False)
    systems.sync_directory(tmp_path)
    assert len(flushed) == 1
