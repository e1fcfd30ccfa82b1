"""`k3 demo`: a model that was trained before is loaded, measured on text it has not seen, and continues a prompt."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from . import UserError, trained_path
from .corpus import HELD_OUT_BYTES, load_corpus
from .display import Display
from .measure import (
    bits_per_byte,
    count_parameters,
    peak_memory,
    sample_windows,
    sampled_bits_per_byte,
    speed,
    usable_cores,
)
from .report import compressor_bits, show_report
from .run import PROMPT, continue_text
from .text import load

PICO = trained_path()

_SAMPLE = 48
_WINDOW = 1024


@dataclass(frozen=True)
class StartOptions:
    """What `k3 demo` was asked to do.

    Args:
        model: folder of a checkpoint; None for `trained_path()`.
        data: files and directories to measure on; empty for what `model` was not trained on of the standard library.
        everything: measure on all held-out text instead of a sample.
        threads: of torch; None takes the cores there are.
        prompt: continued at the end.
        seed: of the continuation.
        held_out_bytes: how much of `data` is measured on at least.
    """

    model: Path | None = None
    data: tuple[Path, ...] = ()
    everything: bool = False
    threads: int | None = None
    prompt: str = PROMPT
    seed: int = 0
    held_out_bytes: int = HELD_OUT_BYTES


def start_demo(options: StartOptions, console: Console) -> dict[str, Any]:
    """Load, measure, continue, print. Writes nothing.

    Returns:
        A report with the same keys as that of a training, where they apply.

    Raises:
        UserError: there is no model, or nothing to measure it on.
    """
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads or min(usable_cores(), 8))
    folder = options.model or PICO
    if options.model is None and not folder.is_dir():
        raise UserError("there is no trained model beside this package. Train one with --train, or give --model PATH.")
    # Saved in bfloat16; on a CPU float32 is faster, and holds the same weights exactly.
    model, tokenizer = load(folder, "float32")
    names = None if options.data else _held_out_names(folder)
    corpus = load_corpus(options.data, held_out_bytes=options.held_out_bytes, held_out_names=names)
    windows = sample_windows(corpus.held_out, _SAMPLE, _WINDOW + 1)
    with Display(console) as display:
        watch = display.stage("measuring on text the model has not seen")
        if options.everything:
            bits = bits_per_byte(model, corpus.held_out, corpus.held_out_bytes, watch)
        else:
            bits = sampled_bits_per_byte(model, windows, watch)
    held_out = {"bytes": corpus.held_out_bytes, "documents": len(corpus.held_out_files)}
    report = {
        "parameters": count_parameters(model),
        "bits_per_byte": {"after": round(bits, 4), "references": compressor_bits(corpus.held_out_text)},
        "held_out": held_out if options.everything else {**held_out, "sample_bytes": int((windows[:, 1:] < 256).sum())},
        "speed": speed(model, corpus.held_out[:_WINDOW]),
        "prompt": options.prompt,
        "continuation": continue_text(model, tokenizer, options.prompt, options.seed),
        "memory": {"peak_bytes": peak_memory()},
        "files": {"model": str(folder)},
    }
    show_report(console, report)
    return report


def _held_out_names(folder: Path) -> list[str]:
    """Which documents the model of a folder was never trained on, as its report says."""
    file = folder / "report.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))["held_out"]["names"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{file} does not say which text was held out ({error!r}). Give --data with text the model has not seen."
        ) from error
