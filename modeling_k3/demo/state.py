"""Training state on disk: one folder per saved step, complete or absent, tensors as safetensors and the rest as JSON.

checkpoints/step-00000120/model.safetensors        parameters and buffers
                          optimizer.safetensors    moments by parameter name, random number state
                          progress.json            step, elapsed time, settings, curve
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

_STEP = re.compile(r"^step-(\d+)$")
_UNFINISHED = ".unfinished-"


def save_state(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> Path:
    """Write the state of `progress["step"]` and remove older ones. Killed at any moment, a complete state remains.

    Args:
        root: folder of all states.
        model: the model being trained.
        optimizer: its moments are saved under the parameters' names.
        progress: what else is needed to go on; must be JSON.

    Returns:
        The folder written.
    """
    target = root / f"step-{progress['step']:08d}"
    if target.exists():
        return _rewrite_progress(target, progress)
    unfinished = root / f"{_UNFINISHED}{target.name}-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_model(model, str(unfinished / "model.safetensors"))
    tensors = _flatten(model, optimizer)
    tensors["rng"] = torch.get_rng_state()
    save_file(tensors, unfinished / "optimizer.safetensors")
    write_json(unfinished / "progress.json", progress)
    publish(unfinished, target)
    for step, folder in _states(root):
        if step != progress["step"]:
            shutil.rmtree(folder, ignore_errors=True)
    return target


def _rewrite_progress(folder: Path, progress: dict[str, Any]) -> Path:
    """The step is saved already, as when a resumed run is stopped at once: only the record can have changed."""
    write_json(folder / "progress.json", progress)
    return folder


def publish(unfinished: Path, target: Path) -> None:
    """Make a finished folder appear under its name, replacing what was there."""
    for file in unfinished.iterdir():
        _flush(file)
    retired = target.with_name(f"{_UNFINISHED}old-{target.name}-{os.getpid()}")
    shutil.rmtree(retired, ignore_errors=True)
    # A non-empty folder cannot be replaced in one step, so the old one is moved out of the way first.
    if target.exists():
        os.replace(target, retired)
    os.replace(unfinished, target)
    shutil.rmtree(retired, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that readers see the old file or the new one, never half of it."""
    unfinished = path.with_name(f"{_UNFINISHED}{path.name}-{os.getpid()}")
    unfinished.write_text(json.dumps(value) + "\n", encoding="utf-8")
    _flush(unfinished)
    os.replace(unfinished, path)


def read_progress(root: Path) -> dict[str, Any] | None:
    """The JSON part of the latest state, or None if there is no state."""
    states = _states(root)
    return json.loads((states[-1][1] / "progress.json").read_text(encoding="utf-8")) if states else None


def load_state(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the latest state into `model`, `optimizer` and torch's generator, and sweep up unfinished folders.

    Raises:
        FileNotFoundError: there is no state.
    """
    sweep(root)
    states = _states(root)
    if not states:
        raise FileNotFoundError(f"no training state in {root}")
    folder = states[-1][1]
    load_model(model, folder / "model.safetensors")
    tensors = load_file(folder / "optimizer.safetensors")
    torch.set_rng_state(tensors.pop("rng"))
    _unflatten(model, optimizer, tensors)


def sweep(root: Path) -> None:
    """Remove what a killed run left half written."""
    if root.is_dir():
        for leftover in root.glob(f"{_UNFINISHED}*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def _states(root: Path) -> list[tuple[int, Path]]:
    """Finished states as (step, folder), oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.match(path.name))]
    return sorted(found)


def _flatten(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state as tensors named `moment/parameter name`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}/{names[parameter]}": value.contiguous()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _unflatten(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        key, name = full_name.split("/", 1)
        optimizer.state[parameters[name]][key] = value


def _flush(path: Path) -> None:
    # Without it a power cut can leave a renamed folder with empty files.
    if path.is_file():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
