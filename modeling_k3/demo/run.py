"""`k3 demo --train`: from text to a trained, saved, reloaded and measured model."""

import hashlib
import json
import platform
import shutil
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    pipeline,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from modeling_k3 import K3Config, register
from modeling_k3.configuration import preset_names, preset_path
from modeling_k3.training.qat import export_released

from . import UserError
from .allocator import keep_freed_memory
from .card import save_with_card
from .chart import draw_curve
from .corpus import HELD_OUT_BYTES, Corpus, load_corpus
from .display import Display
from .measure import bits_per_byte, count_parameters, peak_memory, speed, usable_cores
from .report import compressor_bits, show_report
from .state import publish, read_progress, sweep, write_json
from .text import Sampling, load
from .tokenizer import BOS_ID, END_OF_MESSAGE_ID, EOS_ID, PAD_ID, VOCAB_SIZE, build_tokenizer
from .train import TrainSettings, require_same_run, train

PROMPT = 'def read_lines(path):\n    """Return'
_CONTINUATION_TOKENS = 160
# Beyond that a model this small gains nothing from further threads.
_MAX_THREADS = 8
_NOT_SHAPE = {"transformers_version", "_name_or_path"}
_MAX_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class DemoOptions:
    """What `k3 demo --train` was asked to do.

    Args:
        out: folder of everything that is written.
        data: files and directories to train on; empty for the standard library's sources.
        preset: name of a preset, or a folder with a config.json.
        settings: of the training.
        threads: of torch; None takes the cores there are.
        fresh: forget what is in `out`.
        prompt: continued at the end.
        save: folder that gets the finished model with a card and its curve; None for none.
        held_out_bytes: see `load_corpus`.
    """

    out: Path = Path("runs/demo")
    data: tuple[Path, ...] = ()
    preset: str = "pico"
    settings: TrainSettings = field(default_factory=TrainSettings)
    threads: int | None = None
    fresh: bool = False
    prompt: str = PROMPT
    save: Path | None = None
    held_out_bytes: int = HELD_OUT_BYTES

    @property
    def states(self) -> Path:
        """Folder of the training states."""
        return self.out / "checkpoints"

    @property
    def model(self) -> Path:
        """Folder of the finished model."""
        return self.out / "model"


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Train, or resume, or only report; see the package's first page.

    Returns:
        The report, as in `report.json`.

    Raises:
        UserError: an option that cannot work.
        Interrupted: stopped by a signal during training, with everything saved.
    """
    register()
    keep_freed_memory()
    transformers_logging.disable_progress_bar()
    # Torch counts cores, not a container's share of them, and with more threads than cores it crawls.
    torch.set_num_threads(options.threads or min(usable_cores(), _MAX_THREADS))
    config = demo_config(options.preset)
    if options.fresh:
        _forget(options)
    if options.save is not None and options.save.exists():
        raise UserError(f"{options.save} exists already; remove it or choose another folder.")
    corpus = load_corpus(options.data, held_out_bytes=options.held_out_bytes)
    identity = {"text": corpus.fingerprint, "model": _fingerprint(config)}
    if (report := _finished_report(options, identity)) is not None:
        console.print("This run is finished; --fresh starts over.")
        return _save(options, _report_again(options, report, console), console)

    console.print(
        f"{options.preset}: {corpus.train_bytes:,} bytes of text to train on, {corpus.held_out_bytes:,} held out"
        + (f", {corpus.skipped} files skipped" if corpus.skipped else "")
    )
    progress = _train(options, config, corpus, identity, console)
    report = _measure(options, corpus, progress, console)
    write_json(options.out / "report.json", report)
    show_report(console, report)
    return _save(options, report, console)


def _save(options: DemoOptions, report: dict[str, Any], console: Console) -> dict[str, Any]:
    if options.save is not None:
        save_with_card(options.model, options.out / "loss.png", report, options.save)
        console.print(f"saved with its card in {options.save}")
    return report


def demo_config(preset: str) -> PreTrainedConfig:
    """The config of a preset (or of a folder), with the demo's vocabulary.

    Raises:
        UserError: there is no such preset, or its model is no demo.
    """
    folder = Path(preset)
    if preset in preset_names():
        folder = preset_path(preset)
    elif not (folder / "config.json").is_file():
        raise UserError(
            f"no preset {preset!r}. Allowed are {', '.join(preset_names())}, or a folder with a config.json."
        )
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be used: {error}") from error
    if config.model_type != K3Config.model_type:
        raise UserError(f"{folder} describes a model of type {config.model_type!r}, not {K3Config.model_type!r}.")
    config.vocab_size = VOCAB_SIZE
    config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS_ID, EOS_ID, PAD_ID
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > _MAX_PARAMETERS:
        raise UserError(f"{preset} has {size:,} parameters; the demo trains models of up to {_MAX_PARAMETERS:,}.")
    return config


def _fingerprint(config: PreTrainedConfig) -> str:
    """A hash of what shapes the model, whatever library version or folder it was read with."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_SHAPE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _forget(options: DemoOptions) -> None:
    """Remove what an earlier run wrote, and nothing else."""
    for folder in (options.states, options.model):
        shutil.rmtree(folder, ignore_errors=True)
    for file in ("report.json", "loss.png"):
        (options.out / file).unlink(missing_ok=True)


def _finished_report(options: DemoOptions, identity: dict[str, str]) -> dict[str, Any] | None:
    """The report of a run that has nothing left to do.

    Raises:
        UserError: the run in this folder is another one.
    """
    progress = read_progress(options.states)
    if progress is None:
        return None
    require_same_run(progress, options.settings, identity)
    file = options.out / "report.json"
    return json.loads(file.read_text(encoding="utf-8")) if progress["finished"] and file.is_file() else None


def _report_again(options: DemoOptions, report: dict[str, Any], console: Console) -> dict[str, Any]:
    if options.prompt != report["prompt"]:
        continuation = continue_text(*load(options.model, "float32"), options.prompt, options.settings.seed)
        report = {**report, "prompt": options.prompt, "continuation": continuation}
    show_report(console, report)
    return report


def _train(
    options: DemoOptions, config: PreTrainedConfig, corpus: Corpus, identity: dict[str, str], console: Console
) -> dict[str, Any]:
    """Train to the end of the budget and save the model. Returns the progress record."""
    set_seed(options.settings.seed)
    model = AutoModelForCausalLM.from_config(config)
    began = read_progress(options.states)
    if began is not None:
        console.print(f"resuming after step {began['step']} ({began['elapsed']:.0f} s trained)")
    with Display(console) as display:
        progress = train(
            model,
            corpus,
            options.settings,
            options.states,
            identity=identity,
            first_look=lambda: bits_per_byte(
                model, corpus.held_out, corpus.held_out_bytes, display.stage("measuring the untrained model")
            ),
            watch=display.tick,
        )
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=[EOS_ID, END_OF_MESSAGE_ID], pad_token_id=PAD_ID
    )
    sweep(options.out)
    unfinished = options.out / ".unfinished-model"
    if options.settings.qat:
        export_released(model, unfinished, dtype=torch.bfloat16, tokenizer=build_tokenizer())
    else:
        model.save_pretrained(unfinished)
        build_tokenizer().save_pretrained(unfinished)
    publish(unfinished, options.model)
    return progress


def _measure(options: DemoOptions, corpus: Corpus, progress: dict[str, Any], console: Console) -> dict[str, Any]:
    """Load the saved model and measure it. Returns the report."""
    settings = options.settings
    # What was saved in bfloat16 is computed in float32: on a CPU that is faster, and rounds less.
    model, tokenizer = load(options.model, "float32")
    with Display(console) as display:
        after = bits_per_byte(
            model, corpus.held_out, corpus.held_out_bytes, display.stage("measuring the trained model")
        )
    tokens = progress["step"] * settings.batch_size * settings.sequence_length
    report = {
        "preset": options.preset,
        "parameters": count_parameters(model),
        "bits_per_byte": {
            "before": round(progress["before"], 4),
            "after": round(after, 4),
            "references": compressor_bits(corpus.held_out_text),
        },
        "held_out": {
            "bytes": corpus.held_out_bytes,
            "documents": len(corpus.held_out_files),
            "names": list(corpus.held_out_files),
        },
        "text": {
            "train_bytes": corpus.train_bytes,
            "skipped": corpus.skipped,
            "fingerprint": corpus.fingerprint,
            "python": None if options.data else platform.python_version(),
        },
        "training": {
            "steps": progress["step"],
            "tokens": tokens,
            "seconds": round(progress["elapsed"], 2),
            "tokens_per_second": round(tokens / max(progress["elapsed"], 1e-9), 1),
            "settings": progress["settings"],
        },
        "speed": speed(model, corpus.held_out[:1024]),
        "prompt": options.prompt,
        "continuation": continue_text(model, tokenizer, options.prompt, options.settings.seed),
        "memory": {"peak_bytes": peak_memory()},
        "threads": torch.get_num_threads(),
        "machine": f"{platform.system()} {platform.machine()}, CPU threads: {torch.get_num_threads()}",
        "date": date.today().isoformat(),
        "files": {"model": str(options.model), "curve": str(options.out / "loss.png")},
        "curve": progress["curve"],
    }
    _draw(options, report)
    return report


def continue_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int) -> str:
    """Continue a prompt with the library's own pipeline."""
    generate = pipeline(
        "text-generation",
        model=model,
        tokenizer=tokenizer,
    )
    set_seed(seed)
    sampling = Sampling(max_new_tokens=_CONTINUATION_TOKENS, temperature=0.9, top_p=0.95)
    return generate(prompt, return_full_text=False, **sampling.arguments())[0]["generated_text"]


def _draw(options: DemoOptions, report: dict[str, Any]) -> None:
    curve, bits, training = report["curve"], report["bits_per_byte"], report["training"]
    draw_curve(
        options.out / "loss.png",
        curve["train"],
        [[0.0, 0, bits["before"]], *curve["held_out"]],
        bits["references"],
        final=bits["after"],
        title=f"K3 {Path(options.preset).name}, trained from scratch",
        note=f"{report['parameters']['total'] / 1e6:.1f} M parameters · {training['steps']:,} steps · "
        f"{training['tokens'] / 1e6:.2f} M tokens · held out: {report['held_out']['bytes']:,} bytes "
        f"in {report['held_out']['documents']} documents",
        by_step=training["settings"]["max_steps"] is not None,
    )
