"""`make gpu-check`: every kernel, and a model, tried on a GPU. Exit code 1 if something has no right implementation.

python -m modeling_k3.readiness.gpu_check --out runs/gpu-check
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers.utils import logging

from modeling_k3.kda_check import make_case
from modeling_k3.kda_fla import fla_kda, refusal
from modeling_k3.kda_ops import chunk_kda
from modeling_k3.readiness.doctor import as_table, examine, is_ready, write_json
from modeling_k3.readiness.model_check import ModelCheck

LENGTHS, HEADS, WIDTH = (1024, 4096, 16384), 16, 128


def measure_speed(device: str, lengths: Sequence[int] = LENGTHS, *, heads: int = HEADS) -> Iterator[dict[str, Any]]:
    """Yield milliseconds of forward and of forward + backward, bf16 inputs, for our chunk form and fla's kernels.

    A row has "ms", or "error" where there was one, such as too little memory for a length.
    """
    paths: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"chunk (torch)": chunk_kda}
    why_not = refusal(torch.empty(1, 64, 1, WIDTH, device=device), -5.0, True, torch.bfloat16)
    if why_not is None:
        paths["fla"] = fla_kda
    for length in lengths:
        case = make_case("released", length, torch.bfloat16, device, heads=heads, width=WIDTH)
        for name, path in paths.items():
            for backward in (False, True):
                row = {"path": name, "length": length, "heads": heads, "backward": backward}
                try:
                    yield row | {"ms": _median(path, case.inputs, backward, device)}
                except Exception as error:
                    yield row | {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}


def _median(
    path: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], backward: bool, device: str, turns: int = 5
) -> float:
    seconds = []
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    # The first turn compiles and warms up.
    for _ in range(turns + 1):
        start = time.perf_counter()
        o, state = path(*leaves, lower_bound=-5.0)
        if backward:
            torch.autograd.grad(o.sum() + state.sum(), leaves)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Try operators, a model and speed, print all of it, write it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of KDA's inputs, for speed")
    parser.add_argument("--heads", type=int, default=HEADS, help="of KDA's inputs, for speed")
    parser.add_argument("--preset", default="small", help="sizes of the model")
    parser.add_argument("--tokens", type=int, default=1024, help="in each of two rows of a training step")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"))
    options = parser.parse_args(arguments)
    console = Console()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        here = 'make gpu-check ARGS="--device cpu"'
        print(f"error: torch finds no CUDA device here; {here} runs the same checks without one", file=sys.stderr)
        return 2
    reports = examine(options.device, thorough=True, again=True, console=console)
    # Kept from here on, whatever happens later.
    write_json(reports, options.out / "operators.json", options.device)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        check = ModelCheck(options.device, Path(folder), options.preset, options.tokens)
        with console.status("a model of random weights: experts, generation, training, attention"):
            found = list(check.reports())
    console.print(as_table(found))
    reports += found
    write_json(reports, options.out / "operators.json", options.device)
    speed = []
    for row in measure_speed(options.device, options.lengths, heads=options.heads):
        speed.append(row)
        what = "forward + backward" if row["backward"] else "forward"
        took = row["error"] if "error" in row else f"{row['ms']:.2f} ms"
        console.print(f"{row['path']}, T={row['length']}, H={row['heads']}, {what}: {took}", soft_wrap=True)
    (options.out / "speed.json").write_text(json.dumps(speed, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {options.out}", soft_wrap=True)
    return 0 if is_ready(reports) else 1


if __name__ == "__main__":
    sys.exit(main())
