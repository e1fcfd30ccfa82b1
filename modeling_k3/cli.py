"""The `k3` command. Every command imports what it needs when it runs, so that `k3 --help` costs nothing."""

import enum
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from modeling_k3.conversion.cli import app as convert
from modeling_k3.readiness.commands import add_commands

app = typer.Typer(
    help="Kimi K3 for transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

USAGE_ERROR = 2
INTERRUPTED = 130


app.add_typer(convert, name="convert")


class Dtype(enum.StrEnum):
    """Number formats a checkpoint can be loaded in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.callback()
def k3() -> None:
    """Kimi K3 for transformers."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run. An unfinished run in it is resumed.")] = Path(
        "runs/demo"
    ),
    data: Annotated[
        list[Path] | None,
        typer.Option(help="File or directory of text; may be given several times. Default: Python's own sources."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Training time.")] = 120,
    preset: Annotated[str, typer.Option(help="Name of a preset, or a folder with a config.json.")] = "pico",
    seed: Annotated[int, typer.Option(min=0, help="Of start values and data order.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: the cores there are, at most 8.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Continued by the trained model at the end.")] = None,
) -> None:
    """Train a small K3 from scratch in two minutes, save it, load it again and report. Ctrl-C is safe: it resumes."""

    def run() -> None:
        from rich.console import Console

        from modeling_k3.demo.run import PROMPT, DemoOptions, run_demo
        from modeling_k3.demo.train import Interrupted, TrainSettings

        options = DemoOptions(
            out=out,
            data=tuple(data or ()),
            preset=preset,
            settings=TrainSettings(seconds=seconds, seed=seed),
            threads=threads,
            fresh=fresh,
            prompt=PROMPT if prompt is None else prompt,
        )
        try:
            run_demo(options, Console())
        except Interrupted as stop:
            again = shlex.join(["k3", *(word for word in sys.argv[1:] if word != "--fresh")])
            typer.echo(
                f"Stopped after step {stop.step} ({stop.elapsed:.0f} of {seconds:g} s), everything is saved.\n"
                f"Go on with:  {again}"
            )
            raise typer.Exit(INTERRUPTED) from None

    _readable(run)


@app.command()
def generate(
    path: Annotated[Path, typer.Argument(help="Folder of a saved K3 checkpoint with its tokenizer.")],
    prompt: Annotated[str, typer.Option(help="Plain text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this total probability.")] = 0.95,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text. Default: another every time.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.auto,
) -> None:
    """Continue a prompt with any saved K3 checkpoint, streaming the text."""

    def run() -> None:
        from transformers.utils import logging

        from modeling_k3.demo.text import Sampling, load, require_checkpoint, stream_text, streamer

        logging.disable_progress_bar()
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
        require_checkpoint(path)
        model, tokenizer = load(path, dtype.value)
        typer.echo(prompt, nl=False)
        stream_text(model, tokenizer, prompt, sampling, streamer(tokenizer))

    _readable(run)


class Effort(enum.StrEnum):
    """How much the model is told to think."""

    low = "low"
    high = "high"
    max = "max"
    none = "none"


@app.command()
def chat(
    path: Annotated[Path, typer.Argument(help="Folder of a saved K3 checkpoint with its tokenizer.")],
    effort: Annotated[Effort, typer.Option(help="How much to think; none says nothing about it.")] = Effort.max,
    thinking: Annotated[bool, typer.Option(help="With or without the think channel.")] = True,
    system: Annotated[str | None, typer.Option(help="System message to begin with.")] = None,
    tools: Annotated[
        str | None, typer.Option(help="JSON file with tool schemas; you are asked for results. Or: stub.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens a turn at most, reasoning included.")] = 2048,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the model's own.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Total probability drawn from. Default: the model's own.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text. Default: another every time.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.auto,
) -> None:
    """Talk to a K3 checkpoint. /help lists the commands inside."""

    def run() -> None:
        from modeling_k3.terminal.session import ChatSettings
        from modeling_k3.terminal.start import run_chat, sampling

        settings = ChatSettings(
            thinking=thinking,
            effort=None if effort is Effort.none else effort.value,
            max_new_tokens=max_new_tokens,
            sampling=sampling(temperature, top_p),
        )
        run_chat(path, settings, tools=tools, system=system, dtype=dtype.value, seed=seed)

    _readable(run)


@convert.command("tokenizer")
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
    except (UserError, OSError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        typer.echo("\nstopped")
        raise typer.Exit(INTERRUPTED) from None


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(USAGE_ERROR)


add_commands(app, _readable)


def main() -> None:
    """Entry point of the `k3` script."""
    app(prog_name="k3")


if __name__ == "__main__":
    main()
