"""The hub: only what a load needs comes down."""

from os import PathLike
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file, cached_files

from .checkpoint import add_variant, canonical, is_excused, layer_of
from .tensor_files import INDEX_NAME, read_index

#: What says where a config comes from, for the library's loader and ours alike.
HUB_OPTIONS = "cache_dir force_download proxies local_files_only token revision subfolder".split()


def fetch_part(repo: str | PathLike, depth: int, has_head: bool, options: dict[str, Any]) -> str | None:
    """Download the index and the files with tensors of the first layers; the library would fetch all files.

    Args:
        repo: name on the hub.
        depth: number of layers that are loaded.
        has_head: whether the model has a language-model head.
        options: of the loader, some of which say what is fetched from where.

    Returns:
        The local folder; None where the checkpoint has no index or no more layers than are loaded.
    """
    hub = {name: options[name] for name in HUB_OPTIONS if options.get(name) is not None}
    lenient = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(repo, add_variant(INDEX_NAME, options.get("variant")), **hub, **lenient)
    if found is None:
        return None
    index = Path(found)
    where = read_index(index)
    if all((layer_of(canonical(name)) or 0) < depth for name in where):
        return None
    cached_files(repo, sorted({file for name, file in where.items() if not is_excused(name, depth, has_head)}), **hub)
    cached_file(repo, "generation_config.json", **hub, **lenient)
    return str(index.parents[len(Path(options.get("subfolder") or "").parts)])
