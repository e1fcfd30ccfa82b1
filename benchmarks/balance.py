"""Load of the experts on a skewed stream: quantile balancing, its histogram form, the sign rule, and nothing.

    python benchmarks/balance.py

A router reads tokens whose common direction makes a few experts popular; half way the direction changes. After every
step the load is judged on the next batch, which nothing has seen. Writes balance.json and balance.png.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from measure import machine
from torch import Tensor

from modeling_k3 import K3Config
from modeling_k3.latent_moe import K3Router
from modeling_k3.training.balancing import RouterBalancer

EXPERTS, TOP_K, WIDTH, TOKENS, STEPS, SHIFT = 32, 4, 64, 4096, 200, 100
GOAL = 1.3
WAYS: dict[str, dict[str, Any]] = {
    "quantile": {"method": "quantile"},
    "histogram": {"method": "histogram"},
    "sign, rate 0.001": {"method": "sign", "rate": 1e-3},
    "sign, rate 0.01": {"method": "sign", "rate": 1e-2},
    "none": {"method": "none"},
}


def batch(step: int) -> Tensor:
    """Tokens [TOKENS, WIDTH] of a step: noise around a direction that changes at SHIFT."""
    common = torch.randn(WIDTH, generator=torch.Generator().manual_seed(7 if step < SHIFT else 8))
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 + step)) + 1.5 * common


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Train the bias for STEPS batches; max / mean of the load on each next one, and the seconds a step adds."""
    torch.manual_seed(0)
    config = K3Config(hidden_size=WIDTH, num_experts=EXPERTS, num_experts_per_token=TOP_K)
    router = K3Router(config).train()
    torch.nn.init.normal_(router.weight, std=0.1)
    balancer, loads, seconds, x = RouterBalancer(router, **options), [], 0.0, batch(0)
    for step in range(STEPS):
        began = time.perf_counter()
        router(x)
        balancer.step()
        seconds += time.perf_counter() - began
        x = batch(step + 1)
        with torch.no_grad():
            load = torch.bincount(router.eval()(x)[2].flatten(), minlength=EXPERTS).double()
        router.train()
        loads.append(round((load.max() / load.mean()).item(), 4))
    return {"max_over_mean": loads, **judge(loads), "milliseconds_per_step": round(1000 * seconds / STEPS, 3)}


def judge(loads: list[float]) -> dict[str, Any]:
    """After how many steps the load is at the goal once, and after how many it stays there; None: never."""
    # The batch after the change is judged with a bias that could not know of it.
    before, after = loads[: SHIFT - 1], loads[SHIFT:]
    return {
        "first_step_at_goal": _hits(before),
        "steps_to_goal": _stays(before),
        "first_step_at_goal_after_shift": _hits(after),
        "steps_to_goal_after_shift": _stays(after),
        "worst_after_ten_steps": max(before[10:]),
        "last_before_shift": before[-1],
    }


def _hits(loads: list[float]) -> int | None:
    return next((step for step, value in enumerate(loads, start=1) if value <= GOAL), None)


def _stays(loads: list[float]) -> int | None:
    late = [index for index, value in enumerate(loads) if value > GOAL]
    first = late[-1] + 2 if late else 1
    return first if first <= len(loads) else None


def draw(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """The load of unseen batches over the steps, one line for each way."""
    figure = Figure(figsize=(8, 4.5), dpi=130, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    styles = {"histogram": {"linestyle": (0, (1, 2)), "linewidth": 3}, "none": {"color": "#9aa3ad"}}
    for name, result in results.items():
        loads = result["max_over_mean"]
        axes.plot(range(1, len(loads) + 1), loads, label=name, **{"linewidth": 1.6, **styles.get(name, {})})
    axes.axhline(GOAL, color="#22262e", linewidth=0.8, linestyle="--")
    axes.annotate(f"goal {GOAL}", (STEPS, GOAL), xytext=(0, 4), textcoords="offset points", ha="right", fontsize=8)
    axes.set(xlabel="step", ylabel="max / mean load, next unseen batch", yscale="log", ylim=(1, None))
    axes.set_yticks([1, 1.5, 2, 3, 4, 6, 8], labels=["1", "1.5", "2", "3", "4", "6", "8"])
    axes.minorticks_off()
    axes.set_title(f"{EXPERTS} experts, top {TOP_K}, {TOKENS} tokens a step; popularity changes at step {SHIFT}")
    axes.legend(frameon=False)
    axes.grid(color="#e9ebee")
    figure.savefig(path)


def main() -> None:
    """Run every way and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = {name: run(options) for name, options in WAYS.items()}
    setting = {"experts": EXPERTS, "top_k": TOP_K, "tokens": TOKENS, "steps": STEPS, "shift": SHIFT, "goal": GOAL}
    report = {"machine": machine(), "setting": setting, "results": results}
    (arguments.out / "balance.json").write_text(json.dumps(report) + "\n")
    draw(arguments.out / "balance.png", results)
    for name, result in results.items():
        print(f"{name:18}", {key: value for key, value in result.items() if key != "max_over_mean"})


if __name__ == "__main__":
    main()
