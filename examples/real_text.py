"""Real text that every Python brings along, for the other examples: source files, and questions about functions."""

import hashlib
import importlib
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_MODULES = (
    "argparse ast base64 bisect calendar codecs collections copy csv datetime difflib fnmatch functools glob gzip "
)
_MODULES += "heapq hmac html inspect io itertools json locale logging math operator os pathlib pickle platform pprint "
_MODULES += "random re shlex shutil socket statistics string struct subprocess tempfile textwrap threading tokenize "
_MODULES += "traceback types typing urllib.parse uuid warnings weakref zipfile"


def source_files(folder: str | None = None) -> Iterator[str]:
    """The text of the .py files below a folder (the standard library by default), shuffled alike everywhere."""
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    for path in sorted(
        root.rglob("*.py"), key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    ):
        if not {"site-packages", "test", "tests"} & set(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield text


def questions() -> list[tuple[str, str]]:
    """Pairs (question, answer) made from the first sentences of the standard library's docstrings."""
    pairs = []
    for name in _MODULES.split():
        module = importlib.import_module(name)
        for member in sorted(getattr(module, "__all__", None) or vars(module)):
            value = getattr(module, member, None)
            doc = inspect.getdoc(value) if callable(value) and not member.startswith("_") else None
            first = (doc or "").partition("\n\n")[0].replace("\n", " ").strip()
            if 20 <= len(first) <= 160:
                pairs.append((f"What is {name}.{member}?", first))
    return pairs
