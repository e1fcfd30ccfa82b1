"""Predicted against measured peak memory, on models drawn after the formulas of `modeling_k3.planning` were frozen.

    python benchmarks/memory.py --models 8 --out benchmarks/results/memory.json

Draws configs, number formats and lengths from a fresh seed, predicts, and then lets each run in a process of its own:
once a prefill in pieces with two decoded tokens, once two training steps with AdamW.

Two things are measured. `allocated`: the highest sum of all tensors, from torch's own record of every allocation, which
is what the formulas are about. `resident`: the growth of the process from the moment before the model is built to its
highest mark in use. What it is larger by is the backend's own: in bfloat16 oneDNN keeps a compiled kernel for each new
shape of a product, which `planning.kernels` estimates. The goal is set on both.
"""

import argparse
import gc
import json
import os
import random
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modeling_k3.planning.kernels import kernel_bytes
from modeling_k3.planning.shape import read_shape
from modeling_k3.planning.workload import Workload, memory_table, total

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.10
#: Freed blocks go back to the system at once, so that the highest mark is what was alive and not what was kept.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}


def draw(rng: random.Random) -> dict[str, Any]:
    """A small config with every switch of the family, in the flat layout."""
    depth = rng.randint(4, 8)
    hidden = 64 * rng.randint(5, 14)
    experts = rng.choice([None, 8, 16, 24])
    kda = sorted(rng.sample(range(1, depth + 1), rng.randint(1, depth - 1)))
    return {
        "model_type": "k3",
        "vocab_size": 1024 * rng.randint(2, 24),
        "hidden_size": hidden,
        "intermediate_size": 64 * rng.randint(6, 30),
        "num_hidden_layers": depth,
        "rms_norm_eps": 1e-5,
        "hidden_act": rng.choice(["situ", "situ", "silu"]),
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": rng.choice([25.0, None]),
        "attn_res_block_size": rng.choice([None, 2, 3, 4]),
        "linear_attn_config": {
            "num_heads": rng.randint(2, 10),
            "head_dim": rng.choice([32, 64, 96, 128]),
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": rng.random() < 0.7,
            "gate_lower_bound": -5.0,
            "kda_layers": kda,
            "full_attn_layers": [i for i in range(1, depth + 1) if i not in kda],
        },
        "num_attention_heads": rng.randint(2, 10),
        "q_lora_rank": rng.choice([None, 128, 192]),
        "kv_lora_rank": rng.choice([64, 128, 256]),
        "qk_nope_head_dim": rng.choice([32, 64, 128]),
        "qk_rope_head_dim": rng.choice([16, 32, 64]),
        "v_head_dim": rng.choice([32, 64, 128]),
        "mla_use_output_gate": rng.random() < 0.7,
        "num_experts": experts,
        "num_experts_per_token": rng.randint(1, 6),
        "num_shared_experts": rng.choice([None, 1, 2]),
        "moe_intermediate_size": 64 * rng.randint(2, 8),
        "routed_expert_hidden_size": rng.choice([None, 128, 256, 320]),
        "latent_moe_use_norm": rng.random() < 0.7,
        "first_k_dense_replace": rng.randint(0, 2),
        "moe_layer_freq": 1,
        "moe_router_activation_func": rng.choice(["sigmoid", "softmax"]),
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": rng.random() < 0.3,
    }


def draw_use(rng: random.Random, mode: str) -> dict[str, Any]:
    """A number format and lengths."""
    return {
        "mode": mode,
        "dtype": rng.choice(["float32", "bfloat16"]),
        "batch": rng.randint(1, 3),
        "context": rng.randint(250, 1200),
        "prefill_chunk": rng.choice([96, 200, 256, 512, 2048]),
        "checkpointing": mode == "train" and rng.random() < 0.3,
    }


def measure(config: dict[str, Any], use: dict[str, Any]) -> dict[str, int]:
    """Bytes of all tensors at the worst moment, and bytes by which this process grows."""
    import torch

    from modeling_k3 import K3Config, gradient_memory
    from modeling_k3.configuration import preset_path

    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = _train if use["mode"] == "train" else _generate
    run(_build(K3Config.from_pretrained(preset_path("tiny")), use), {**use, "context": 64, "prefill_chunk": 32})
    before = _status("VmRSS")
    model = _build(K3Config.from_dict(config), use)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # The highest mark starts again from here: drawing random weights takes copies of its own.
    Path("/proc/self/clear_refs").write_text("5")
    run(model, use)
    resident = _status("VmHWM") - before
    for parameter in model.parameters():
        parameter.grad = None
    # An optimizer that is garbage and freed during the next run would be counted as negative bytes.
    gc.collect()
    # Gradients of large stacks are maps of their own, of which torch's record knows nothing.
    gradient_memory._LARGE = sys.maxsize
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(model, use)
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        highest = max(highest, alive)
    return {"allocated": weights + highest, "resident": resident}


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+)", text, re.MULTILINE)[1]) * 1024


def _build(config: Any, use: dict[str, Any]) -> Any:
    import torch

    from modeling_k3 import K3ForCausalLM

    return K3ForCausalLM._from_config(config, dtype=getattr(torch, use["dtype"]))


def _generate(model: Any, use: dict[str, Any]) -> None:
    import torch

    from modeling_k3 import K3Cache

    ids = torch.randint(0, model.config.vocab_size, (use["batch"], use["context"] - 2))
    cache = K3Cache(model.config)
    cache.reserve(use["context"])
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.eval().generate(ids, cache=cache, prefill_chunk_size=use["prefill_chunk"], **options)


def _train(model: Any, use: dict[str, Any]) -> None:
    import torch

    model.train()
    if use["checkpointing"]:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, model.config.vocab_size, (use["batch"], use["context"]))
    for _ in range(2):
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def formulas() -> dict[str, Any]:
    """Which formulas predicted: the tree of the planning folder in git, and whether its files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()

    folder = "modeling_k3/planning"
    return {"tree": git("rev-parse", f"HEAD:{folder}"), "is_changed": bool(git("status", "--porcelain", "--", folder))}


def run_case(config: dict[str, Any], use: dict[str, Any]) -> dict[str, Any]:
    """Predict here, measure in a process of its own."""
    shape, workload = read_shape(config), Workload(**use)
    table = memory_table(shape, workload)
    predicted, kernels = total(table), kernel_bytes(shape, workload)
    command = [sys.executable, __file__, "--measure", json.dumps([config, use])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **_ALLOCATOR}, check=False)
    if done.returncode:
        raise RuntimeError(f"the measurement failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    measured = found["allocated"]
    weights = sum(table["weights"].values()) + table.get("training", {}).get("optimizer", 0)
    return {
        "config": config,
        "use": use,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "kernel_bytes": kernels,
        "resident_bytes": found["resident"],
        "error": round(predicted / measured - 1, 4),
        "error_of_resident": round((predicted + kernels) / found["resident"] - 1, 4),
        "exact_part_bytes": weights,
        "error_of_the_rest": round((predicted - weights) / max(1, measured - weights) - 1, 4),
        "bytes": table,
    }


def _pairs(cases: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(abs(case["error"]), abs(case["error_of_resident"])) for case in cases]


def main() -> int:
    """Draw, predict, measure, write; the exit status says whether all errors are within the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=8, help="drawn for each of inference and training")
    parser.add_argument("--seed", type=int, help="default: a fresh one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "memory.json")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))))
        return 0
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    rng, cases = random.Random(seed), []
    for index in range(2 * options.models):
        cases.append(run_case(draw(rng), draw_use(rng, ("infer", "train")[index % 2])))
        case = cases[-1]
        print(
            f"{case['use']['mode']:6} {case['use']['dtype']:9} {case['measured_bytes'] / 2**20:8.1f} MiB allocated, "
            f"{case['predicted_bytes'] / 2**20:8.1f} predicted {case['error']:+.1%}, without weights and optimizer "
            f"{case['error_of_the_rest']:+.1%}; {case['resident_bytes'] / 2**20:8.1f} resident "
            f"{case['error_of_resident']:+.1%}",
            flush=True,
        )
    errors = {
        f"{mode}, {what}": [abs(c[key]) for c in cases if c["use"]["mode"] == mode]
        for mode in ("infer", "train")
        for what, key in (("tensors", "error"), ("process", "error_of_resident"))
    }
    worst = {name: max(values) for name, values in errors.items()}
    from benchmarks.measure import machine

    report = {
        "command": f"python benchmarks/memory.py --models {options.models} --seed {seed}",
        "machine": machine(),
        "formulas": formulas(),
        "goal": GOAL,
        "seed": seed,
        "worst_error": worst,
        "within_goal": f"{sum(max(pair) <= GOAL for pair in _pairs(cases))} of {len(cases)}",
        "cases": cases,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(worst, report["within_goal"])
    return int(max(worst.values()) > GOAL)


if __name__ == "__main__":
    raise SystemExit(main())
