"""`k3 convert ...`: checkpoints from one form to another. Every command imports what it needs when it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from modeling_k3.conversion.job import Job

app = typer.Typer(
    help="Convert checkpoints: layouts, number formats, shards.", no_args_is_help=True, add_completion=False
)

Source = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint folder. It is only read.")]
Target = Annotated[Path, typer.Argument(help="Folder that appears when everything is written. Run again to resume.")]
ShardSize = Annotated[str | None, typer.Option(help="Largest file, such as 5GB. Default: as in the source.")]
Like = Annotated[Path | None, typer.Option(exists=True, help="Released folder whose wrapper and vision part to take.")]
NoVision = Annotated[bool, typer.Option("--text-only", help="Leave vision and projector tensors out.")]


@app.command(epilog="Example: k3 convert flat RELEASE OUT")
def flat(source: Source, target: Target, max_shard_size: ShardSize = None) -> None:
    """Write a release as a flat, text-only k3 checkpoint. Experts stay as they are."""
    _run(source, target, layout="flat", max_shard_size=max_shard_size)


@app.command(epilog="Example: k3 convert released my-k3 OUT --like RELEASE")
def released(source: Source, target: Target, like: Like = None, max_shard_size: ShardSize = None) -> None:
    """Write a flat checkpoint in the released layout."""
    _run(source, target, layout="released", like=like, max_shard_size=max_shard_size)


@app.command(epilog="Example: k3 convert dequantize RELEASE OUT --max-shard-size 20GB")
def dequantize(source: Source, target: Target, text_only: NoVision = False, max_shard_size: ShardSize = None) -> None:
    """Expand MXFP4 experts to bfloat16, exactly. Four times the bytes."""
    _run(source, target, experts="bf16", vision=not text_only, max_shard_size=max_shard_size)


@app.command(epilog="Example: k3 convert quantize my-k3 OUT")
def quantize(source: Source, target: Target, text_only: NoVision = False, max_shard_size: ShardSize = None) -> None:
    """Pack plain experts as MXFP4 by the rule of the release, for a model trained here."""
    _run(source, target, experts="mxfp4", vision=not text_only, max_shard_size=max_shard_size)


@app.command(epilog="Example: k3 convert text RELEASE OUT")
def text(source: Source, target: Target, max_shard_size: ShardSize = None) -> None:
    """Extract the text model: the same layout without vision and projector tensors."""
    _run(source, target, vision=False, max_shard_size=max_shard_size)


@app.command(epilog="Example: k3 convert shard my-k3 OUT --max-shard-size 5GB")
def shard(
    source: Source,
    target: Target,
    max_shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB. A huge one merges everything.")],
) -> None:
    """Merge or split files. No tensor changes."""
    _run(source, target, max_shard_size=max_shard_size)


@app.command(epilog="Example: k3 convert verify RELEASE OUT --tokens 64")
def verify(
    first: Source,
    second: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="The other checkpoint folder.")],
    tokens: Annotated[int, typer.Option(min=0, help="Length of a random prompt for the logits; 0: tensors only.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompt.")] = 0,
) -> None:
    """Compare two checkpoints: tensors, and logits with the first one's routes forced. Exit code 1: they differ."""
    from modeling_k3.conversion.verify import verify as compare

    with _readable(), _bar() as progress:
        report = compare(first, second, tokens=tokens, seed=seed, progress=progress)
    for line in report.lines():
        typer.echo(line)
    raise typer.Exit(0 if report.is_same else 1)


@app.command(epilog="Example: k3 convert tiny OUT --preset tiny --seed 1")
def tiny(
    target: Target,
    preset: Annotated[str, typer.Option(help="Name of a preset, or a folder with a config.json.")] = "tiny",
    experts: Annotated[str, typer.Option(help="mxfp4 or bf16.")] = "mxfp4",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="Length of the golden prompt; 0: no golden file.")] = 16,
    max_shard_size: Annotated[str, typer.Option(help="Largest file.")] = "5GB",
) -> None:
    """Make a seeded random checkpoint in the released layout, with golden logits beside it."""
    from modeling_k3 import K3Config
    from modeling_k3.configuration import preset_path
    from modeling_k3.conversion.tiny import plan_tiny

    with _readable():
        folder = Path(preset) if (Path(preset) / "config.json").is_file() else preset_path(preset)
        config = K3Config.from_pretrained(folder)
        _write(plan_tiny(target, config, seed=seed, experts=experts, tokens=tokens, max_shard_size=max_shard_size))


def _run(
    source: Path,
    target: Path,
    *,
    layout: str | None = None,
    experts: str | None = None,
    vision: bool = True,
    max_shard_size: str | None = None,
    like: Path | None = None,
) -> None:
    """Convert: plan, say what will be written, write."""
    from modeling_k3.conversion.convert import Options, plan_conversion

    with _readable():
        _write(plan_conversion(source, target, Options(layout, experts, vision, max_shard_size, like)))


def _write(job: "Job") -> None:
    from modeling_k3.conversion.convert import describe
    from modeling_k3.conversion.job import run_job

    typer.echo(describe(job))
    is_there = job.target.exists()
    with _bar() as progress:
        run_job(job, progress)
    typer.echo(f"was there, checked and complete: {job.target}" if is_there else f"written: {job.target}")


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar with bytes per second and time left; yields what is called with (done, total)."""
    from tqdm import tqdm
    from transformers.utils import logging

    # One bar is enough.
    logging.disable_progress_bar()
    with tqdm(unit="B", unit_scale=True, disable=None) as bar:
        is_first = True

        def advance(done: int, total: int) -> None:
            nonlocal is_first
            if is_first:
                # What an earlier run wrote must not count into the rate.
                bar.reset(total)
                bar.initial = bar.n = done
                is_first = False
            bar.total = total
            bar.update(done - bar.n)

        yield advance


@contextmanager
def _readable() -> Iterator[None]:
    """What the user can put right is one line and exit code 2, without a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        is_file = isinstance(error, OSError) and error.filename is not None
        typer.echo(f"error: {error.filename}: {error.strerror}" if is_file else f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("\nstopped; the same command goes on from here")
        raise typer.Exit(130) from None
