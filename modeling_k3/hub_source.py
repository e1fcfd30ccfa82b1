"""Where a model was read from, and what its card and its licence files say there."""

import os
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import metadata_load
from torch import nn
from transformers.utils.hub import cached_file, cached_files

CARD_FILE = "README.md"
NOTICES = re.compile(r"(LICENSE|LICENCE|NOTICE|THIRD[-_]PARTY[-_]NOTICES?)(\.(txt|md))?", re.IGNORECASE)
#: What says under which terms weights are; a load does not fetch it.
_TERMS = (
    CARD_FILE,
    *(f"{name}{end}" for name in ("LICENSE", "NOTICE", "THIRD_PARTY_NOTICES") for end in ("", ".md", ".txt")),
)


class Source(NamedTuple):
    """Where a model was read from.

    Args:
        folder: of its files; None where there is none.
        repository: its name on the hub; None for a folder of one's own.
    """

    folder: Path | None
    repository: str | None

    def card(self) -> dict[str, Any]:
        """The metadata of the card there; empty where there is none that can be read."""
        path = self.folder / CARD_FILE if self.folder is not None else None
        if path is not None and path.is_file():
            # Anybody's file: nothing in it may keep a model from being saved.
            with suppress(Exception):
                return metadata_load(path) or {}
        return {}

    def notices(self) -> list[Path]:
        """The licence and notice files there."""
        files = sorted(self.folder.iterdir()) if self.folder is not None else []
        return [path for path in files if NOTICES.fullmatch(path.name)]


def source_of(model: nn.Module) -> Source:
    """Where a model was read from: its own folder, or the hub's copy of it, which its terms are fetched to."""
    name = str(getattr(model, "name_or_path", "") or "")
    if os.path.isdir(name):
        return Source(Path(name), None)
    try:
        found = name and cached_file(
            name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
    except OSError:
        found = None
    if not found:
        return Source(None, None)
    folder = Path(found).parent
    _fetch_terms(name, folder.name)
    return Source(folder, name)


@lru_cache
def _fetch_terms(repository: str, commit: str) -> None:
    """Lay card, licence and notices beside the files that a load fetched; without a network, nothing."""
    names = ("missing_entries", "connection_errors", "gated_repo")
    with suppress(OSError):
        cached_files(
            repository, list(_TERMS), revision=commit, **{f"_raise_exceptions_for_{name}": False for name in names}
        )
