"""What a process takes while it runs: anonymous memory, mapped pages, faults, bytes from the disk, pressure.

And what stands beside every figure: the machine, the date, the command.
"""

import os
import platform
import re
import resource
import shlex
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any


def memory() -> dict[str, int]:
    """Bytes of this process: anonymous (what the system cannot drop), mapped files, both."""
    text = Path("/proc/self/status").read_text()
    kinds = {"anonymous": "RssAnon", "mapped": "RssFile", "resident": "VmRSS"}
    return {kind: int(re.search(rf"^{field}:\s+(\d+)", text, re.MULTILINE)[1]) * 1024 for kind, field in kinds.items()}


def counters() -> dict[str, float]:
    """Running totals: faults, bytes read from the disk, seconds in which everything waited for io or memory."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {"major_faults": usage.ru_majflt, "minor_faults": usage.ru_minflt, "cpu_s": usage.ru_utime + usage.ru_stime}
    for line in _read("/proc/self/io").splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            found["disk_read_bytes"] = int(value)
    for kind in ("io", "memory"):
        stalled = re.search(r"^full .*total=(\d+)", _read(f"/proc/pressure/{kind}"), re.MULTILINE)
        if stalled:
            found[f"{kind}_stall_s"] = int(stalled[1]) / 1e6
    return found


class Watch:
    """Samples memory in the background; `result` holds peaks and what the counters grew by."""

    def __init__(self, interval: float = 0.1) -> None:
        self.interval, self.result = interval, {}
        self._stop = threading.Event()

    def __enter__(self) -> "Watch":
        self._before, self._peak = (memory(), counters()), memory()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            self._note()

    def _note(self) -> None:
        self._peak = {kind: max(self._peak[kind], value) for kind, value in memory().items()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._note()
        now, after = memory(), counters()
        start, before = self._before
        self.result = {
            **{f"peak_{name}_bytes": value for name, value in self._peak.items()},
            **{f"grown_{name}_bytes": now[name] - start[name] for name in now},
            **{f"peak_grown_{name}_bytes": self._peak[name] - start[name] for name in now},
            **{name: round(after[name] - before.get(name, 0), 3) for name in after},
        }


def machine() -> dict[str, Any]:
    """What the figures were measured on, when, and by which command."""
    import torch
    import transformers

    model = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def command() -> str:
    """The command line of this process, relative to the current folder; folders elsewhere are dots."""
    here, words = Path.cwd(), []
    for word in sys.argv:
        option, equals, value = word.rpartition("=")
        if Path(value).is_absolute():
            value = str(Path(value).relative_to(here)) if Path(value).is_relative_to(here) else "..."
        words.append(option + equals + value)
    return shlex.join(["python", *words])


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
