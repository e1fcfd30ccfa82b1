"""The demo's result as a table; the same figures go to `report.json`."""

import gzip
import lzma
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


def compressor_bits(text: bytes) -> dict[str, float]:
    """Bits per byte that general compressors need for a text: a scale for the model's figure.

    They see the held-out text only and adapt to it as they go; the model has seen other text and stays as it is.
    """
    return {
        "gzip -9": round(8 * len(gzip.compress(text, 9, mtime=0)) / len(text), 4),
        "lzma": round(8 * len(lzma.compress(text, preset=9)) / len(text), 4),
    }


def show_report(console: Console, report: dict[str, Any]) -> None:
    """Print the short report.

    Args:
        report: the contents of `report.json`.
    """
    bits, training, speed = report["bits_per_byte"], report.get("training"), report["speed"]
    held_out, parameters = report["held_out"], report["parameters"]
    before = f"{bits['before']:.2f} → " if "before" in bits else ""
    sample = f" (measured on {held_out['sample_bytes']:,} of them)" if "sample_bytes" in held_out else ""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("parameters", f"{parameters['total']:,}, of which {parameters['active']:,} work on each token")
    table.add_row(
        "held-out bits per byte",
        f"[bold]{before}{bits['after']:.2f}[/bold]   ("
        + ", ".join(f"{name} {level:.2f}" for name, level in bits["references"].items())
        + ")",
    )
    table.add_row(
        "held out",
        f"{held_out['bytes']:,} bytes in {held_out['documents']} documents chosen by a hash of their names{sample}",
    )
    if training is not None:
        table.add_row(
            "training",
            f"{training['tokens']:,} tokens in {training['steps']:,} steps, {training['seconds']:.0f} s, "
            f"{training['tokens_per_second']:,.0f} tokens/s",
        )
    table.add_row(
        "speed",
        f"prefill {speed['prefill_tokens_per_second']:,.0f} tokens/s ({speed['prefill_tokens']:,} at once), "
        f"decode {speed['decode_tokens_per_second']:,.0f} tokens/s",
    )
    table.add_row("peak memory", f"{report['memory']['peak_bytes'] / 2**20:,.0f} MiB")
    table.add_row("checkpoint", Text(report["files"]["model"]))
    if "curve" in report["files"]:
        table.add_row("loss curve", Text(report["files"]["curve"]))
    console.print(table)
    show_continuation(console, report["prompt"], report["continuation"])


def show_continuation(console: Console, prompt: str, continuation: str) -> None:
    """Print a prompt and what the model made of it."""
    console.print(Panel(Text.assemble((prompt, "bold"), continuation), title="continuation", title_align="left"))
