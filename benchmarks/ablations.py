"""What each part of K3 is worth at pico size: one training run per variant, with the same text, budget and seed.

    python benchmarks/ablations.py attention        # or attn_res, routing, latent, balancing, capacity, gate, seeds
    python benchmarks/ablations.py all

Every variant differs from the preset in one place. What is finished is kept in ablations.json, an interrupted run goes
on where it stopped, and the baseline is trained once for all groups. Writes ablations.json, .md and .png.

Every row is one run: a single observation. The group "seeds" trains the baseline with other seeds, which shows how
large a difference has to be before it means something. Speed is counted in CPU seconds of the process, because a
machine's other work then hardly changes it; compare it within one table only.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ablation_report import draw, table
from measure import machine, memory
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, set_seed

import modeling_k3
from modeling_k3.demo.allocator import keep_freed_memory
from modeling_k3.demo.corpus import load_corpus
from modeling_k3.demo.measure import count_parameters, peak_memory, sample_windows, sampled_bits_per_byte
from modeling_k3.demo.run import demo_config
from modeling_k3.demo.state import write_json
from modeling_k3.demo.train import Interrupted, Tick, TrainSettings, train
from modeling_k3.training.router_stats import RouterWatch

BASELINE = "baseline"
#: How much of the end of a run the load is averaged over.
LATE_STEPS = 20

Change = Callable[[PreTrainedConfig], dict[str, Any]]


def _linear(**entries: Any) -> Change:
    return lambda config: {"linear_attn_config": {**config.linear_attn_config, **entries}}


def _all_layers(kind: str) -> Change:
    return lambda config: {"layer_types": [kind] * config.num_hidden_layers}


def _fields(**entries: Any) -> Change:
    return lambda config: entries


def _latent(share: float) -> Change:
    return lambda config: {"routed_expert_hidden_size": round(config.hidden_size * share)}


#: group -> variant -> what it changes in the preset's config.
GROUPS: dict[str, dict[str, Change]] = {
    "attention": {
        "KDA only": _all_layers("linear_attention"),
        "full attention only": _all_layers("full_attention"),
    },
    "attn_res": {
        "plain residual": _fields(attn_res_block_size=None),
        "AttnRes, blocks of 1": _fields(attn_res_block_size=1),
        "AttnRes, blocks of 4": _fields(attn_res_block_size=4),
    },
    "routing": {"routed on the latent": _fields(router_input="latent")},
    "latent": {
        "latent 1/4": _latent(1 / 4),
        "latent 1/2": _latent(1 / 2),
        "no latent": _fields(routed_expert_hidden_size=None),
    },
    "balancing": {
        "no balancing": _fields(router_balancing="none"),
        "sign, rate 0.01": _fields(router_balancing="sign", router_bias_update_rate=0.01),
        "auxiliary loss 0.01": _fields(router_balancing="aux_loss", router_aux_loss_coef=0.01),
    },
    "capacity": {
        "capacity 1.0": _fields(moe_expert_capacity_factor=1.0),
        "capacity 1.25": _fields(moe_expert_capacity_factor=1.25),
        "capacity 2.0": _fields(moe_expert_capacity_factor=2.0),
    },
    "gate": {"softplus gate": _linear(gate_lower_bound=None)},
    "seeds": {"baseline, seed + 1": _fields(), "baseline, seed + 2": _fields()},
}
#: What the baseline is called in a group's table.
BASELINE_IS = {
    "attention": "3 KDA to 1 full attention",
    "attn_res": "AttnRes, blocks of 2",
    "routing": "routed on the full width",
    "latent": "latent 3/8",
    "balancing": "quantile balancing",
    "capacity": "no capacity limit",
    "gate": "bounded gate",
    "seeds": "baseline, seed",
}
VARIANTS: dict[str, Change] = {
    BASELINE: _fields(),
    **{name: change for group in GROUPS.values() for name, change in group.items()},
}


def build_config(variant: str, preset: str) -> PreTrainedConfig:
    """The preset's config with the one change of a variant, checked."""
    config = demo_config(preset)
    for name, value in VARIANTS[variant](config).items():
        setattr(config, name, value)
    config.validate()
    return config


def run(variant: str, setting: dict[str, Any], state: Path) -> dict[str, Any]:
    """Train one variant in this process, from its saved state if there is one, and measure it."""
    modeling_k3.register()
    keep_freed_memory()
    seed = setting["seed"] + (int(variant[-1]) if variant in GROUPS["seeds"] else 0)
    settings = TrainSettings(
        max_steps=setting["steps"], batch_size=setting["rows"], sequence_length=setting["length"], looks=1, seed=seed
    )
    corpus = load_corpus()
    windows = sample_windows(corpus.held_out, setting["windows"], 1025)
    before = memory()["resident"]
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(build_config(variant, setting["preset"]))
    seen = _Seen(model, state.with_suffix(".json"))
    identity = {"text": corpus.fingerprint, "variant": variant}
    progress = train(model, corpus, settings, state, identity=identity, first_look=lambda: 0.0, watch=seen.tick)
    peak = peak_memory() - before
    bits = sampled_bits_per_byte(model, windows)
    if not math.isfinite(bits):
        raise FloatingPointError(f"{variant}: held-out bits per byte are {bits}")
    return {
        "held_out_bits_per_byte": round(bits, 4),
        "train_bits": [entry[2] for entry in progress["curve"]["train"]],
        **seen.figures(setting["rows"] * setting["length"]),
        "peak_megabytes": round(peak / 1e6, 1),
        "parameters": count_parameters(model),
        "text": corpus.fingerprint,
    }


class _Seen:
    """Load of the routers and CPU time of every step, kept beside the training state: resuming loses nothing."""

    def __init__(self, model: PreTrainedModel, file: Path) -> None:
        self.routers, self.file = RouterWatch(model), file
        self.steps: list[list[float]] = json.loads(file.read_text()) if file.is_file() else []
        self._cpu = time.process_time()

    def tick(self, tick: Tick) -> None:
        """Take in one step."""
        report = self.routers.take().values()
        now = time.process_time()
        worst = max(row["max_over_mean"] for row in report)
        dropped = sum(row["dropped"] for row in report) / len(report)
        # The state may be older than this record: what is trained again replaces what was seen before.
        self.steps[tick.step - 1 :] = [[worst, dropped, now - self._cpu]]
        write_json(self.file, self.steps)
        self._cpu = time.process_time()

    def figures(self, tokens: int) -> dict[str, Any]:
        """Speed is that of the median step, so that saving and warming up do not count."""
        self.routers.close()
        loads, dropped, seconds = zip(*self.steps, strict=True)
        late = loads[-LATE_STEPS:]
        return {
            "tokens_per_cpu_second": round(tokens / statistics.median(seconds)),
            "load_max_over_mean": round(sum(late) / len(late), 3),
            "dropped": round(sum(dropped) / len(dropped), 4),
            "loads": [round(value, 3) for value in loads],
        }


def known_rows(file: Path, setting: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Finished rows of an earlier run.

    Raises:
        SystemExit: they were made with another setting, and one table must not mix two.
    """
    if not file.is_file():
        return {}
    report = json.loads(file.read_text())
    if report["setting"] != setting:
        raise SystemExit(f"{file} holds runs of another setting: {report['setting']}; give --out, or remove the file")
    return report["runs"]


def main() -> None:
    """Train what is missing, each variant in a process of its own, and write after every one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="+", choices=[*GROUPS, "all"], help="what to compare with the baseline")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--state", type=Path, default=Path("runs/ablations"), help="folder of unfinished trainings")
    parser.add_argument("--preset", default="pico")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=48, help="held-out windows of 1,024 bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = {name: getattr(options, name) for name in ("preset", "steps", "rows", "length", "windows", "seed")}
    if options.one:
        try:
            write_json(options.out, run(options.one, setting, options.state))
        except Interrupted as stopped:
            raise SystemExit(130) from stopped
        return

    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "ablations.json"
    rows = known_rows(file, setting)
    groups = list(GROUPS) if "all" in options.groups else options.groups
    wanted = [BASELINE, *(name for group in groups for name in GROUPS[group])]
    for name in [name for name in wanted if name not in rows]:
        print(f"training: {name}", flush=True)
        rows[name] = _in_own_process(name, setting, options.state)
        _write(file, setting, rows)
    print(table(groups, GROUPS, BASELINE_IS, rows))


def _in_own_process(name: str, setting: dict[str, Any], states: Path) -> dict[str, Any]:
    """A process for each run, so that peaks of memory are its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        words = [f"--{key}={value}" for key, value in setting.items()]
        state = states / "".join(letter if letter.isalnum() else "-" for letter in name)
        states.mkdir(parents=True, exist_ok=True)
        words += [f"--state={state}", f"--out={out}", f"--one={name}", "all"]
        with subprocess.Popen([sys.executable, __file__, *words]) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                # Ctrl-C reached the training as well, which saves its state before it ends.
                code = process.wait() or 130
        if code:
            raise SystemExit(f"{name} ended with {code}; after a Ctrl-C the same command goes on")
        return json.loads(out.read_text())


def _write(file: Path, setting: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    ordered = {name: rows[name] for name in VARIANTS if name in rows}
    note = "one run per row: single observations; speed in CPU seconds of one thread; compare within this file only"
    write_json(file, {"note": note, "machine": machine(), "setting": setting, "runs": ordered})
    present = [group for group in GROUPS if any(name in rows for name in GROUPS[group])]
    text = table(present, GROUPS, BASELINE_IS, rows)
    tokens = setting["steps"] * setting["rows"] * setting["length"]
    head = f"{setting['preset']}, {setting['steps']} steps, {tokens:,} tokens, seed {setting['seed']}. "
    file.with_suffix(".md").write_text(f"{head}{note[0].upper()}{note[1:]}.\n\n{text}")
    draw(file.with_suffix(".png"), present, GROUPS, BASELINE_IS, rows)


if __name__ == "__main__":
    main()
