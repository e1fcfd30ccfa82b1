"""What differs between operating systems: locks, reading from a place in a file, how much memory there is.

Linux, macOS and Windows are told apart by what Python has there, never by name. On Windows no folder can be opened, no
open file replaced, and text is the default of what is read by a descriptor.
"""

import ctypes
import os
from pathlib import Path

try:
    import fcntl
except ImportError:
    # Windows.
    fcntl = None
    import msvcrt

#: Whether a folder has a descriptor, which can be locked and flushed to the disk.
OPENS_FOLDERS = hasattr(os, "O_DIRECTORY")


def lock_file(handle: int) -> None:
    """Lock an open file (where `OPENS_FOLDERS`, a folder too) until its descriptor is closed or the process ends.

    Args:
        handle: descriptor, open for writing if it is a file.

    Raises:
        BlockingIOError: another process, or another descriptor of this one, has it.
        OSError: the file system knows no locks.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    try:
        # The first byte, which need not be there.
        os.lseek(handle, 0, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        raise BlockingIOError(*error.args) from None


def open_to_read(path: str | os.PathLike) -> int:
    """A descriptor that gives the bytes of a file as they are."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))


def read_at(path: str | os.PathLike, handle: int, start: int, view: memoryview) -> int:
    """Fill `view` from byte `start` of an open file on; returns the number of bytes, which may be less.

    No file position is shared with other threads or forked processes.
    """
    if hasattr(os, "preadv"):
        return os.preadv(handle, [view], start)
    # Where an open file cannot be replaced, its path leads to the same one.
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        return file.readinto(view)


def memory_bound() -> int:
    """Bytes of main memory that a process may take at most: all there is, on Windows what is free."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # MEMORYSTATUSEX: its own length and a percentage in the first eight bytes, then total and available memory, ...
    status = (ctypes.c_uint64 * 8)(64)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("the system does not say how much memory it has")
    return status[2]


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut, where a program can do anything about it."""
    if not OPENS_FOLDERS:
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
