"""What a probe found out about a path on this machine, remembered between processes.

One JSON file in the user's cache folder; an entry belongs to one device and one set of versions, so that an update of
any of them asks again. A verdict that cannot be stored is kept for the process.
"""

import importlib.metadata
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Verdict:
    """Whether a path may be chosen, and why (not)."""

    passed: bool
    reason: str


_seen: dict[str, Verdict] = {}


def verdict_file() -> Path:
    """Where verdicts are kept: `modeling_k3/verdicts.json` in XDG_CACHE_HOME or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modeling_k3" / "verdicts.json"


def verdict_key(path: str, device: torch.device, dtype: torch.dtype) -> str:
    """Name the path, the dtype, the device and every version that can change the outcome."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}"
    versions = [f"torch {torch.__version__}"]
    for package in ("triton", "fla-core"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} none")
    return " | ".join([path, str(dtype).removeprefix("torch."), name, *versions])


def read_verdict(key: str) -> Verdict | None:
    """Return what is known under `key`, or None."""
    if key not in _seen:
        entry = _stored().get(key)
        if isinstance(entry, dict) and isinstance(entry.get("passed"), bool):
            _seen[key] = Verdict(entry["passed"], str(entry.get("reason", "")))
    return _seen.get(key)


def write_verdict(key: str, verdict: Verdict) -> None:
    """Remember a verdict, on disk where that is possible."""
    _seen[key] = verdict
    file = verdict_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({**_stored(), key: asdict(verdict)}, indent=1)
        # Written beside and renamed: another process never reads half a file.
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as draft:
            draft.write(content)
        os.replace(draft.name, file)
    except OSError:
        return


def forget_verdicts() -> None:
    """Drop what this process holds in memory; the file stays."""
    _seen.clear()


def _stored() -> dict[str, object]:
    try:
        content = json.loads(verdict_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
