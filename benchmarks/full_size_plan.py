"""The whole release under a plan: a budget of bytes, a long context, and what the process really took.

    python benchmarks/full_size_plan.py --dir /somewhere/with/15GB --budget 24GiB --context 131072

Builds the sparse stand-in of `full_size.py` (without its oracle), measures disk and memory, loads with `load_within`,
runs a few decode steps, and writes the memory that the process held for itself beside the budget. The seconds that are
expected are those of a disk that has all the bytes; most of the stand-in are holes, which no disk has to deliver.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.full_size import ROOT, build, prompt, read_manifest
from benchmarks.measure import Watch, machine
from modeling_k3 import K3Cache
from modeling_k3.planning import load_within
from modeling_k3.planning.expected import expected_of
from modeling_k3.planning.shape import read_shape
from modeling_k3.planning.sizes import format_bytes
from modeling_k3.planning.speed import measure_machine


@torch.no_grad()
def run(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Load by the plan and decode."""
    rates = measure_machine(options.dir, use_known=False)
    with Watch(0.1) as watch:
        started = time.perf_counter()
        model = load_within(directory, options.budget, context=options.context)
        load_s = time.perf_counter() - started
        plan = model.memory_plan
        expected = expected_of(plan, read_shape(model.config), rates)
        cache, ids, steps = K3Cache(model.config), prompt(model.config.vocab_size, options.tokens), []
        # The prompt's tokens one by one, so that each is a step that can be compared.
        for token in ids[0]:
            begin = time.perf_counter()
            logits = model(token.view(1, 1), cache=cache).logits
            steps.append(time.perf_counter() - begin)
            print(f"step {len(steps)}: {steps[-1]:.1f} s, {model.expert_residency.stats()}", flush=True)
    return {
        "plan": {"budget": plan.budget, "used": plan.used, "expert_bytes": plan.expert_bytes,
                 "dense": plan.dense_place, "experts": plan.expert_place, "context": plan.use.context},
        "load_s": round(load_s, 2),
        "step_s": [round(seconds, 2) for seconds in steps],
        "step_s_expected_with_a_full_context": round(expected.step, 2),
        "logits_are_finite": bool(logits.isfinite().all()),
        "residency": model.expert_residency.stats(),
        **watch.result,
    }  # fmt: skip


def main() -> int:
    """Build, run in this process, write; the exit status says whether memory stayed within the budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "full_size_plan.json")
    parser.add_argument("--budget", default="24GiB")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=93, help="fewer for a trial")
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--build-only", action="store_true", help="make the stand-in and stop")
    options = parser.parse_args()
    directory = options.dir / f"planned-{options.layers}"
    if options.build_only:
        build(directory, read_manifest(), options.layers)
        return 0
    if not directory.exists():
        # In a process of its own: what building takes must not count as what running takes.
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--build-only"], check=True)
    command = f"python benchmarks/full_size_plan.py --dir DIR --budget {options.budget} --context {options.context}"
    report = {"command": f"{command} --layers {options.layers} --tokens {options.tokens}", "machine": machine()}
    report |= run(directory, options)
    # What it holds for itself: the dense part's pages are the system's, which may drop them at any time.
    held = report["peak_anonymous_bytes"] + report["residency"]["peak_bytes"]
    report |= {"held_bytes": held, "within_budget": held <= report["plan"]["budget"]}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    print(f"held {format_bytes(held)} of {options.budget}")
    shutil.rmtree(directory)
    return int(not report["within_budget"])


if __name__ == "__main__":
    raise SystemExit(main())
