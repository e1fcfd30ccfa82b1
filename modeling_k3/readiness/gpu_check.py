"""`make gpu-check`: the probe on a GPU, together with speed. Exit code 1 if an operator has no right implementation.

python -m modeling_k3.readiness.gpu_check --out runs/gpu-check
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from modeling_k3.kda_check import make_case
from modeling_k3.kda_fla import fla_kda, refusal
from modeling_k3.kda_ops import chunk_kda
from modeling_k3.readiness.doctor import examine, is_ready, write_json

LENGTHS, HEADS, WIDTH = (1024, 4096, 16384), 16, 128


def measure_speed(device: str, lengths: Sequence[int] = LENGTHS, *, heads: int = HEADS) -> Iterator[dict[str, Any]]:
    """Yield milliseconds of forward and of forward + backward, bf16 inputs, for our chunk form and fla's kernels."""
    paths: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"chunk (torch)": chunk_kda}
    why_not = refusal(torch.empty(1, 64, 1, WIDTH, device=device), -5.0, True, torch.bfloat16)
    if why_not is None:
        paths["fla"] = fla_kda
    for length in lengths:
        case = make_case("released", length, torch.bfloat16, device, heads=heads, width=WIDTH)
        for name, path in paths.items():
            for backward in (False, True):
                milliseconds = _median(path, case.inputs, backward, device)
                yield {"path": name, "length": length, "heads": heads, "backward": backward, "ms": milliseconds}


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
    """Run probe and speed, print both, write them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"))
    options = parser.parse_args(arguments)
    console = Console()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        console.print("error: there is no CUDA device here; --device cpu runs the same checks in torch")
        return 2
    reports = examine(options.device, thorough=True, again=True, console=console)
    write_json(reports, options.out / "operators.json", options.device)
    speed = []
    for row in measure_speed(options.device, options.lengths, heads=options.heads):
        speed.append(row)
        what = "forward + backward" if row["backward"] else "forward"
        console.print(f"{row['path']}, T={row['length']}, H={row['heads']}, {what}: {row['ms']:.2f} ms")
    (options.out / "speed.json").write_text(json.dumps(speed, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {options.out}", soft_wrap=True)
    return 0 if is_ready(reports) else 1


if __name__ == "__main__":
    sys.exit(main())
