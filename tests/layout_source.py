"""A source file and the imports in it, parsed and never imported; the files of this tree."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]

_CATCHES_IMPORT_ERROR = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


@dataclass(frozen=True)
class Source:
    """A file by its path below the root (with `/`), and its text."""

    name: str
    text: str

    @classmethod
    def read(cls, name: str) -> "Source":
        """Read a file of this tree."""
        return cls(name, (ROOT / name).read_text(encoding="utf-8"))

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text, filename=self.name)

    @property
    def stem(self) -> str:
        """The module's own name."""
        return PurePosixPath(self.name).stem

    def finding(self, line: int, message: str) -> str:
        """Say what is wrong in the form `file:line: message`."""
        return f"{self.name}:{line}: {message}"


@dataclass(frozen=True)
class Import:
    """One imported module. `names` is empty for `import module`; `guarded`: inside a `try` that catches ImportError."""

    line: int
    level: int
    module: str
    names: tuple[str, ...]
    guarded: bool

    @property
    def top(self) -> str:
        """The first part of the module's name."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        dotted = "." * self.level + self.module
        return f"from {dotted} import {', '.join(self.names)}" if self.names else f"import {dotted}"


def iter_imports(node: ast.AST, guarded: bool = False) -> Iterator[Import]:
    """Walk through every import at any depth."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(node.lineno, 0, alias.name, (), guarded)
    elif isinstance(node, ast.ImportFrom):
        names = tuple(alias.name for alias in node.names)
        yield Import(node.lineno, node.level, node.module or "", names, guarded)
    elif isinstance(node, ast.Try):
        inside = guarded or any(_catches_import_error(handler) for handler in node.handlers)
        for child in node.body:
            yield from iter_imports(child, inside)
        for child in (*node.handlers, *node.orelse, *node.finalbody):
            yield from iter_imports(child, guarded)
    else:
        for child in ast.iter_child_nodes(node):
            yield from iter_imports(child, guarded)


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(isinstance(node, ast.Name) and node.id in _CATCHES_IMPORT_ERROR for node in ast.walk(handler.type))


def tracked_files() -> list[str]:
    """Name the files that are or would be committed, below ROOT; outside a git checkout, all but hidden folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]
        names = [name for name in names if not name.startswith(".") and "__pycache__" not in name]
    return sorted(name for name in set(names) if name and (ROOT / name).is_file())


def is_text(name: str) -> bool:
    """Tell text from binary as git does: by a zero byte near the beginning."""
    with (ROOT / name).open("rb") as file:
        return b"\0" not in file.read(8000)
