"""The `k3` command. Every command imports what it needs when it runs, so that `k3 --help` costs nothing."""

import enum
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from modeling_k3.conversion.cli import app as convert
from modeling_k3.planning.commands import add_commands as add_plan
from modeling_k3.readiness.commands import add_commands
from modeling_k3.terminal.usage import Commands

app = typer.Typer(
    name="k3",
    cls=Commands,
    help="Kimi K3 for transformers.",
    epilog="Start with:\nk3 demo\nk3 generate --prompt 'import os'",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

USAGE_ERROR = 2
TRAINING = "With --train"
INTERRUPTED = 130


app.add_typer(convert, name="convert")


class Dtype(enum.StrEnum):
    """Number formats a checkpoint can be loaded in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


AnyDtype = Annotated[Dtype, typer.Option(metavar="FORMAT", help="Of the weights: auto, float32, bfloat16 or float16.")]


@app.callback()
def k3() -> None:
    """Kimi K3 for transformers."""


@app.command(epilog="Examples:\nk3 demo --prompt 'def main('\nk3 demo --train --seconds 60 --save my-k3")
def demo(
    model: Annotated[Path | None, typer.Option(help="Folder of a trained model. Default: one comes along.")] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="File or directory of text; may be given several times. Default: Python's own sources."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Measure on all held-out text, not on a sample.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: the cores there are, at most 8.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Continued by the trained model at the end.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Train from scratch instead.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run; an unfinished one is resumed. Default: runs/demo.", rich_help_panel=TRAINING
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Training time. Default: 120.", rich_help_panel=TRAINING)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="A number of steps instead of a time: the same bits every time.", rich_help_panel=TRAINING
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Windows per step. Default: 8.", rich_help_panel=TRAINING)
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=16, help="Bytes per window. Default: 256.", rich_help_panel=TRAINING)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Preset, or folder with a config.json. Default: pico.", rich_help_panel=TRAINING)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of start values and data order. Default: 0.", rich_help_panel=TRAINING)
    ] = None,
    qat: Annotated[
        bool | None,
        typer.Option(
            "--qat", help="Train the experts on the MXFP4 grid and save a packed release.", rich_help_panel=TRAINING
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="New folder that gets the model with a card.", rich_help_panel=TRAINING)
    ] = None,
    fresh: Annotated[
        bool | None, typer.Option("--fresh", help="Start over instead of resuming.", rich_help_panel=TRAINING)
    ] = None,
) -> None:
    """Show a small trained K3: what it predicts of text it has not seen, how fast it is, what it writes.

    With --train a K3 is trained from scratch in two minutes, saved, loaded again and measured. Ctrl-C is safe.
    """
    settings = {
        "seconds": seconds, "max_steps": steps, "batch_size": batch_size, "sequence_length": sequence_length,
        "seed": seed, "qat": qat,
    }  # fmt: skip
    options = {"out": out, "preset": preset, "fresh": fresh, "save": save}
    common = {"data": tuple(data or ()), "threads": threads, **({} if prompt is None else {"prompt": prompt})}
    if train:
        _readable(lambda: _train_demo(_given(settings), {**_given(options), **common}, model, everything))
    else:
        _readable(lambda: _start_demo({**common, "model": model, "everything": everything}, settings | options))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _start_demo(options: dict[str, Any], training: dict[str, Any]) -> None:
    """Show the model of `options`; options of `training` make no sense here."""
    from rich.console import Console

    from modeling_k3.demo import UserError

    if given := list(_given(training)):
        names = ", ".join("--" + name.replace("max_", "").replace("_", "-") for name in given)
        raise UserError(f"{names} belong to a training: give --train as well.")
    from modeling_k3.demo.start import StartOptions, start_demo

    start_demo(StartOptions(**options), Console())


def _train_demo(settings: dict[str, Any], options: dict[str, Any], model: Path | None, everything: bool) -> None:
    """Train with the options that were given and the defaults of the others."""
    from rich.console import Console

    from modeling_k3.demo import UserError
    from modeling_k3.demo.run import DemoOptions, run_demo
    from modeling_k3.demo.train import Interrupted, TrainSettings

    if model is not None or everything:
        raise UserError("--model and --all show a trained model: leave out --train, or them.")
    try:
        run_demo(DemoOptions(settings=TrainSettings(**settings), **options), Console())
    except Interrupted as stop:
        again = shlex.join(["k3", *(word for word in sys.argv[1:] if word != "--fresh")])
        typer.echo(
            f"Stopped after step {stop.step} ({stop.elapsed:.0f} s trained), everything is saved.\nGo on with:  {again}"
        )
        raise typer.Exit(INTERRUPTED) from None


@app.command(epilog="Examples:\nk3 generate --prompt 'class Node:' --seed 0\nk3 generate my-k3 --prompt 'def main('")
def generate(
    prompt: Annotated[str, typer.Option(help="Plain text to continue.")],
    path: Annotated[
        Path | None, typer.Argument(help="Folder of a saved K3 checkpoint and its tokenizer. Default: one comes along.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this total probability.")] = 0.95,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text. Default: another every time.")] = None,
    dtype: AnyDtype = Dtype.auto,
) -> None:
    """Continue a prompt with any saved K3 checkpoint, streaming the text."""

    def run() -> None:
        from transformers.utils import logging

        from modeling_k3.demo import trained_path
        from modeling_k3.demo.text import Sampling, load, require_checkpoint, stream_text, streamer

        logging.disable_progress_bar()
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
        folder = path or trained_path()
        require_checkpoint(folder)
        model, tokenizer = load(folder, dtype.value)
        typer.echo(prompt, nl=False)
        stream_text(model, tokenizer, prompt, sampling, streamer(tokenizer))

    _readable(run)


class Effort(enum.StrEnum):
    """How much the model is told to think."""

    low = "low"
    high = "high"
    max = "max"
    none = "none"


@app.command(epilog="Examples:\nk3 chat MODEL --effort low\nk3 chat MODEL --tools stub --system 'Be brief.'")
def chat(
    path: Annotated[Path, typer.Argument(help="Folder of a saved K3 checkpoint with its tokenizer.")],
    effort: Annotated[
        Effort, typer.Option(metavar="LEVEL", help="How much to think: low, high, max; or none, to say nothing of it.")
    ] = Effort.max,
    no_thinking: Annotated[bool, typer.Option("--no-thinking", help="Answer without thinking.")] = False,
    system: Annotated[str | None, typer.Option(help="System message to begin with.")] = None,
    tools: Annotated[
        str | None, typer.Option(help="JSON file with tool schemas, whose results you type; or stub, a pretend tool.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to write at most in a turn, reasoning included.")
    ] = 2048,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 always takes the likeliest token. Default: the model's own.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens of this total probability. Default: the model's own."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text. Default: another every time.")] = None,
    dtype: AnyDtype = Dtype.auto,
) -> None:
    """Talk to a K3 checkpoint. /help lists the commands inside."""

    def run() -> None:
        from modeling_k3.terminal.session import ChatSettings
        from modeling_k3.terminal.start import run_chat, sampling

        settings = ChatSettings(
            thinking=not no_thinking,
            effort=None if effort is Effort.none else effort.value,
            max_new_tokens=max_new_tokens,
            sampling=sampling(temperature, top_p),
        )
        run_chat(path, settings, tools=tools, system=system, dtype=dtype.value, seed=seed)

    _readable(run)


@convert.command("tokenizer", epilog="Example: k3 convert tokenizer RELEASE OUT")
def convert_tokenizer_files(
    source: Annotated[Path, typer.Argument(help="Released folder with tiktoken.model and tokenizer_config.json.")],
    out: Annotated[Path, typer.Argument(help="Folder for tokenizer.json and what belongs to it.")],
    plain: Annotated[
        bool, typer.Option("--plain", help="Name the library's own class, for versions that refuse an unknown one.")
    ] = False,
) -> None:
    """Make a tokenizer.json, which needs no code, from a release's rank file."""

    def run() -> None:
        from modeling_k3.conversion.tokenizer import convert_tokenizer
        from modeling_k3.demo import UserError

        try:
            report = convert_tokenizer(source, out, is_plain=plain)
        except ValueError as error:
            raise UserError(str(error)) from error
        typer.echo(
            f"{report['base_tokens']} base tokens, {report['control_tokens']} control tokens; merging compared on "
            f"{report['checked']} strings.\nWrote {', '.join(report['files'])}"
        )

    _readable(run)


def _readable(run: Callable[[], None]) -> None:
    """Run a command; what the user can put right is one line and exit code 2, without a traceback."""
    from modeling_k3.demo import UserError

    # Read when torch is imported. Threads spin for milliseconds before they sleep, on a core that another program may
    # be waiting for: next to busy ones a training step took ten times as long. Sleeping at once costs half the speed of
    # an idle machine; this many rounds (some microseconds) cost nothing.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        run()
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        _fail(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        typer.echo("\nstopped")
        raise typer.Exit(INTERRUPTED) from None


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(USAGE_ERROR)


add_plan(app, _readable)
add_commands(app, _readable)


def main() -> None:
    """Entry point of the `k3` script."""
    app(prog_name="k3")


if __name__ == "__main__":
    main()
