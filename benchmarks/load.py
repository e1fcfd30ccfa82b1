"""Loading an MXFP4 checkpoint of a few gigabytes: our three forms beside transformers' own reading of the same bytes.

    python benchmarks/load.py --dir /somewhere/with/4GB --out benchmarks/results/load.json

The checkpoint is made as by `k3 convert tiny`. Every contender is a process of its own with an empty slate. They take
turns, each round beginning with another one, and every figure is the median of the rounds. The files are read once
before each turn, so the system's page cache is warm for all. transformers reads the format through its
compressed-tensors path, which expands; it needs that package (`--peer-path` adds a folder to its search path).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CONTENDERS = ("mapped", "packed", "dense", "transformers")
TOKENS = 8
#: What each figure is. Memory is counted beside what Python, torch and transformers take before the load.
COLUMNS = {
    "load_s": "seconds of from_pretrained, files in the page cache",
    "anonymous_after_load": "bytes that the system cannot drop, after the load",
    "mapped_after_load": "bytes of files in this process's maps, which the system can drop, after the load",
    "peak_anonymous_during_load": "largest anonymous memory while loading, bytes",
    "peak_resident_during_load": "largest anonymous and mapped memory together while loading, bytes",
    "first_token_s": f"seconds of the first forward: {TOKENS} tokens of prompt, logits of the last",
    "second_time_s": "seconds of the same forward once more",
    "peak_anonymous_with_forward": "largest anonymous memory during the first forward, bytes",
    "token": "the likeliest next token; all contenders run the same model",
}


def make(directory: Path, layers: int) -> None:
    """Write the checkpoint: 64 experts of 1024 x 1024 x 1024 in all layers but the first."""
    from benchmarks.miniature import miniature
    from modeling_k3.conversion.tiny import make_tiny

    sizes = {"vocab_size": 32768, "intermediate_size": 4096, "num_experts": 64, "num_experts_per_token": 4}
    config = miniature(layers, **sizes)
    make_tiny(directory, config, tokens=0, max_shard_size="500MB")


def contend(name: str, directory: Path) -> dict[str, Any]:
    """Load and compute one token; runs in a process of its own."""
    import torch
    from transformers import PreTrainedModel
    from transformers.utils import logging

    from benchmarks.measure import Watch, memory
    from modeling_k3 import K3ForCausalLM

    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass

    logging.disable_progress_bar()
    base = memory()
    with Watch(0.02) as watch:
        started = time.perf_counter()
        if name == "transformers":
            # The library's own method, past ours.
            load = PreTrainedModel.from_pretrained.__func__
            model, info = load(K3ForCausalLM, directory, ignore_mismatched_sizes=True, output_loading_info=True)
            fill_padded(model, directory, info)
        else:
            model = K3ForCausalLM.from_pretrained(directory, expert_storage=name)
        seconds = time.perf_counter() - started
    after = memory()
    ids = torch.arange(TOKENS).unsqueeze(0)
    with Watch(0.02) as run, torch.no_grad():
        started = time.perf_counter()
        token = model(ids, logits_to_keep=1).logits.argmax(-1)
        first = time.perf_counter() - started
    with torch.no_grad():
        started = time.perf_counter()
        model(ids, logits_to_keep=1)
        again = time.perf_counter() - started
    return {
        "load_s": round(seconds, 2),
        "anonymous_after_load": after["anonymous"] - base["anonymous"],
        "mapped_after_load": after["mapped"] - base["mapped"],
        "peak_anonymous_during_load": watch.result["peak_anonymous_bytes"] - base["anonymous"],
        "peak_resident_during_load": watch.result["peak_resident_bytes"] - base["resident"],
        "first_token_s": round(first, 2),
        "second_time_s": round(again, 2),
        "peak_anonymous_with_forward": run.result["peak_anonymous_bytes"] - base["anonymous"],
        "token": int(token),
    }


def fill_padded(model: Any, directory: Path, info: dict[str, Any]) -> None:
    """Give `A_log` its stored values: the library's reader knows no padding and leaves it at its start values."""
    from modeling_k3.checkpoint import Checkpoint, canonical

    others = {*info["missing_keys"], *info["unexpected_keys"], *(key[0] for key in info["mismatched_keys"])}
    others = {name for name in others if not name.endswith(".A_log")}
    if others:
        raise ValueError(f"another model: {len(others)} tensors were not loaded, such as {min(others)}")
    checkpoint = Checkpoint.from_directory(directory)
    stored = checkpoint.locate(name for name in checkpoint.where if name.endswith(".A_log"))[0]
    places = {canonical(name): place for name, place in stored.items()}
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            file, entry = places[canonical(name)]
            parameter.data.copy_(file.read(entry)[: len(parameter)])


def take_turns(directory: Path, peer_path: str | None, rounds: int) -> list[dict[str, dict[str, Any]]]:
    """Every contender once a round, each round beginning with the next of them."""
    found = []
    for number in range(rounds):
        start = number % len(CONTENDERS)
        order = CONTENDERS[start:] + CONTENDERS[:start]
        found.append({name: measure(name, directory, peer_path) for name in order})
        print(f"round {number + 1} of {rounds}", table(found[-1]), sep="\n", file=sys.stderr)
    return found


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The medians of the rounds, with all the times beside them; or the error of a contender that failed."""
    found: dict[str, dict[str, Any]] = {}
    for name in CONTENDERS:
        turns = [each[name] for each in rounds]
        failed = next((turn for turn in turns if "error" in turn), None)
        found[name] = failed or {
            **{field: round(median(turn[field] for turn in turns), 2) for field in COLUMNS if field != "token"},
            "token": turns[0]["token"] if len({turn["token"] for turn in turns}) == 1 else "differs between rounds",
            "all_load_s": [turn["load_s"] for turn in turns],
            "all_first_token_s": [turn["first_token_s"] for turn in turns],
        }
    return found


def measure(name: str, directory: Path, peer_path: str | None) -> dict[str, Any]:
    """One contender in a fresh process; what it printed last, or why it failed."""
    path = os.pathsep.join(part for part in (peer_path if name == "transformers" else None, str(ROOT)) if part)
    command = [sys.executable, __file__, "--dir", str(directory), "--contender", name]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def judge(results: dict[str, dict[str, Any]], size: int, stack: int) -> dict[str, dict[str, Any]]:
    """The goals of the load, against what was measured."""
    goals = {
        "packed: peak of the load at most file size + one layer's expert stack": (
            "packed",
            "peak_anonymous_during_load",
            size + stack,
        ),
        "mapped: anonymous memory after the load at most 300 MiB": ("mapped", "anonymous_after_load", 300 << 20),
    }
    return {
        text: {"goal": goal, "measured": results[name].get(field), "met": results[name].get(field, goal + 1) <= goal}
        for text, (name, field, goal) in goals.items()
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The figures in columns."""
    lines = [f"{'':14}{'load s':>8}{'anon MB':>9}{'peak MB':>9}{'first token s':>15}{'again s':>9}{'token':>7}"]
    for name, found in results.items():
        if "error" in found:
            lines.append(f"{name:14}{found['error']}")
            continue
        megabytes = [round(found[field] / 1e6) for field in ("anonymous_after_load", "peak_anonymous_during_load")]
        lines.append(
            f"{name:14}{found['load_s']:>8}{megabytes[0]:>9}{megabytes[1]:>9}{found['first_token_s']:>15}"
            f"{found['second_time_s']:>9}{found['token']:>7}"
        )
    return "\n".join(lines)


def note(load_average: float) -> str:
    """How far the times can be trusted; memory does not depend on who else computes."""
    if load_average < 0.3:
        return "an idle machine"
    return (
        f"other programs were running ({load_average:.1f} on average before the start): times are upper bounds and "
        "good for ratios only; memory figures are not affected"
    )


def main() -> int:
    """Make the checkpoint, let the contenders take turns, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="where the checkpoint is made")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "load.json")
    parser.add_argument("--layers", type=int, default=21, help="21 layers are 2.5 GB")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--peer-path", help="folder with the compressed-tensors package, if it is not installed")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(contend(options.contender, options.dir)))
        return 0
    load_average = os.getloadavg()[0]
    directory = options.dir / f"load-{options.layers}"
    make(directory, options.layers)
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    # 64 experts of three 1024 x 1024 matrices at 4.25 bits.
    stack = 64 * 3 * 1024 * 1024 * 17 // 32
    results = summary(take_turns(directory, options.peer_path, options.rounds))
    from benchmarks.measure import machine

    threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " if "OMP_NUM_THREADS" in os.environ else ""
    report = {
        "command": f"{threads}python benchmarks/load.py --layers {options.layers} --rounds {options.rounds} --dir ...",
        "machine": machine(),
        "note": note(load_average),
        "checkpoint_bytes": size,
        "rounds": options.rounds,
        "columns": COLUMNS,
        "results": results,
        "goals": judge(results, size, stack),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(results), json.dumps(report["goals"], indent=2), sep="\n")
    shutil.rmtree(directory)
    return 0 if all(goal["met"] for goal in report["goals"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
