"""Presets: one folder per model size, each holding the `config.json` of that size.

A folder can be given wherever transformers takes a model folder:

    K3Config.from_pretrained(preset_path("tiny"))
"""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def preset_names() -> tuple[str, ...]:
    """Name every preset there is, in alphabetical order.

    Returns:
        The names of the folders beside this file that hold a `config.json`.
    """
    return tuple(sorted(path.parent.name for path in _FOLDER.glob("*/config.json")))


def preset_path(name: str) -> Path:
    """Find the folder of a preset.

    Args:
        name: one of `preset_names()`. Paths are refused: a preset is found by its bare name only.

    Returns:
        The absolute path of the folder, with `config.json` and perhaps `generation_config.json` in it.

    Raises:
        ValueError: there is no such preset.
    """
    names = preset_names()
    if name not in names:
        raise ValueError(f"preset {name!r} is unknown; the presets are: {', '.join(names)}")
    return _FOLDER / name
