"""The class map (`auto_map`) of a folder with code: model and tokenizer are saved one by one, in any order.

And the label of its files: they travel without the licence that lies beside the package.
"""

import json
from pathlib import Path
from typing import Any

LABEL = "# SPDX-FileCopyrightText: the modeling_k3 authors\n# SPDX-License-Identifier: Apache-2.0\n"


def tokenizer_reference(folder: Path) -> list[str | None] | None:
    """Where `tokenizer_config.json` says that the tokenizer's class is, in a file beside it; None where it does not."""
    path = folder / "tokenizer_config.json"
    found = _read(path).get("auto_map", {}) if path.is_file() else {}
    named = found.get("AutoTokenizer") if isinstance(found, dict) else None
    return named if isinstance(named, list) and all(each is None or "--" not in each for each in named) else None


def complete_class_map(folder: Path) -> None:
    """Name the tokenizer's class in the map of a config.json that names a model's, where its code lies beside it."""
    named, path = tokenizer_reference(folder), folder / "config.json"
    if named is None or not path.is_file():
        return
    config = _read(path)
    found = config.get("auto_map")
    if isinstance(found, dict) and str(found.get("AutoConfig")).endswith(".K3Config") and "AutoTokenizer" not in found:
        config["auto_map"] = {**found, "AutoTokenizer": named}
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def label_code(folder: Path) -> None:
    """Say in each of our files in a folder whose it is and under which licence; files of others are left alone."""
    own = Path(__file__).parent
    # A copy of the code that came from the hub has been labelled, and has files of others beside it.
    is_copy = __name__.startswith("transformers_modules.")
    for path in folder.glob("*.py") if not is_copy else ():
        content = path.read_bytes()
        if (own / path.name).is_file() and content == (own / path.name).read_bytes():
            path.write_bytes(LABEL.encode() + content)


def _read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}
