"""`k3 doctor` and `k3 precision`. Each imports what it needs when it runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

ABOVE_THRESHOLD = 1
NOT_READY = 1


def add_commands(app: typer.Typer, readable: Callable[[Callable[[], None]], None]) -> None:
    """Add the commands to `app`.

    Args:
        readable: runs a command and turns what the user can put right into one line and an exit code.
    """

    @app.command(epilog="Examples:\nk3 doctor\nk3 doctor --device cuda --thorough --json doctor.json")
    def doctor(
        device: Annotated[
            str | None, typer.Option(help="Device, as torch names it. Default: the GPU if there is one.")
        ] = None,
        thorough: Annotated[bool, typer.Option("--thorough", help="Try longer sequences too.")] = False,
        again: Annotated[bool, typer.Option("--again", help="Do not trust stored verdicts.")] = False,
        json: Annotated[Path | None, typer.Option(help="Write the results to this file as well.")] = None,
    ) -> None:
        """Check every operator of the model on this machine. Exit code 1: one has no implementation that is right."""
        readable(lambda: run_doctor(device, thorough, again, json))

    @app.command(epilog="Example: k3 precision MODEL --text notes.txt --fast chunk --calibrate")
    def precision(
        model: Annotated[str, typer.Argument(help="Folder of a saved K3 checkpoint with its tokenizer.")],
        text: Annotated[Path, typer.Option(help='Plain text, or a .jsonl of lines with "prompt" and "answer".')],
        out: Annotated[Path, typer.Option(help="Folder for report.json and report.png.")] = Path("runs/precision"),
        fast: Annotated[str, typer.Option(help="The path under test: auto, chunk, recurrent or fla.")] = "auto",
        threshold: Annotated[
            float | None, typer.Option(min=0, help="Mean KL allowed with forced routes, in nats. Default: by dtype.")
        ] = None,
        calibrate: Annotated[
            bool, typer.Option("--calibrate", help="Take the threshold from the noise floor of the dtype.")
        ] = False,
        seeds: Annotated[int, typer.Option(min=1, help="Noise runs per sample with --calibrate.")] = 3,
        max_tokens: Annotated[int, typer.Option(min=2, help="Plain text is cut into pieces of this length.")] = 8192,
        samples: Annotated[int, typer.Option(min=1, help="Pieces or lines at most.")] = 8,
        dtype: Annotated[
            str, typer.Option(help="Number format of the weights: auto, float32, bfloat16 or float16.")
        ] = "auto",
    ) -> None:
        """Compare the fast path of a model with its exact path on your own text. Exit code 1: above the threshold."""
        count = seeds if calibrate else 0
        readable(lambda: run_precision(model, text, out, fast, threshold, count, max_tokens, samples, dtype))


def run_doctor(device: str | None, thorough: bool, again: bool, json: Path | None) -> None:
    """Print the table of operators, write the JSON, leave with `NOT_READY` if something has no right implementation."""
    import torch
    from rich.console import Console

    from modeling_k3.demo import UserError
    from modeling_k3.readiness.doctor import examine, is_ready, write_json

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = [name for name in ("cuda", "mps") if getattr(torch, name).is_available()]
        raise UserError(f"device={device!r} is not on this machine; allowed are {['cpu', *found]}") from error
    reports = examine(device, thorough=thorough, again=again, console=Console())
    if json is not None:
        write_json(reports, json, device)
    if not is_ready(reports):
        raise typer.Exit(NOT_READY)


def run_precision(
    model: str,
    text: Path,
    out: Path,
    fast: str,
    threshold: float | None,
    seeds: int,
    max_tokens: int,
    samples: int,
    dtype: str,
) -> None:
    """Load, measure, print the table, write report.json and report.png; leave with `ABOVE_THRESHOLD` if it is."""
    from rich.console import Console

    from modeling_k3.demo import UserError
    from modeling_k3.demo.text import load
    from modeling_k3.kda_paths import check_kda_implementation
    from modeling_k3.readiness import precision_report as report_forms
    from modeling_k3.readiness.precision import compare_answers, measure_precision
    from modeling_k3.readiness.texts import read_samples

    console = Console()
    try:
        check_kda_implementation(fast)
    except ValueError as error:
        raise UserError(str(error)) from None
    # Loading takes its time; what is misspelt is said before.
    if not text.is_file():
        raise UserError(f'--text {text} is no file. Expected is plain text, or a .jsonl with "prompt" and "answer".')
    loaded, tokenizer = load(Path(model), dtype)

    def encode(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False)["input_ids"]

    try:
        found = read_samples(text, encode, max_tokens=max_tokens, limit=samples)
    except ValueError as error:
        raise UserError(str(error)) from None
    report = measure_precision(loaded, found, fast=fast, threshold=threshold, calibration_seeds=seeds)
    with_answers = [sample for sample in found if sample.answer is not None]
    if with_answers:
        report.answers = compare_answers(loaded, tokenizer, with_answers, fast=fast)
    console.print(report_forms.as_table(report))
    if report.answers:
        console.print("answers: " + ", ".join(f"{name} {share:.0%}" for name, share in report.answers.items()))
    report_forms.write_json(report, out / "report.json")
    report_forms.draw(report, out / "report.png")
    console.print(report_forms.as_sentence(report), soft_wrap=True)
    console.print(f"written: {out / 'report.json'}, {out / 'report.png'}", style="dim", soft_wrap=True)
    if not report.passed:
        raise typer.Exit(ABOVE_THRESHOLD)
