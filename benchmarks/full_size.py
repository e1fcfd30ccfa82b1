"""Dress rehearsal at full size: load the whole release and run a forward, on a machine with a seventieth of its bytes.

    python benchmarks/full_size.py --dir /somewhere/with/15GB --out benchmarks/results/full_size.json

Makes a stand-in with the true names, dtypes and shapes of all 497,220 tensors in 96 sparse files (see `stand_in.py`),
loads it through `from_pretrained`, runs 16 tokens, and compares the first three layers with an oracle that reads by
file offset. Nothing in the package knows about it. `--layers 5` rehearses the rehearsal.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import stand_in
from benchmarks.measure import Watch, machine
from benchmarks.offset_oracle import OffsetReader, first_layers
from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.configuration import preset_path
from modeling_k3.conversion.convert import with_experts, wrapped
from modeling_k3.experts import iter_experts

ROOT = Path(__file__).resolve().parents[1]
GOALS = {
    "load_s": 30,
    "load_growth_bytes": 2 << 30,
    "forward_s": 25 * 60,
    "forward_anonymous_bytes": 8 << 30,
}
SEED = 2026


def read_manifest() -> dict[str, Any]:
    """Names and shapes of all tensors of the release."""
    return json.loads((ROOT / "tests" / "golden" / "full_manifest.json").read_text())


def prompt(vocab: int, tokens: int) -> torch.Tensor:
    """Token ids [1, T]."""
    return torch.randint(0, vocab, (1, tokens), generator=torch.Generator().manual_seed(SEED))


def build(directory: Path, manifest: dict[str, Any], depth: int) -> tuple[K3Config, list, list[str]]:
    """Write the stand-in; returns its config, its tensors and the experts that have values."""
    config = K3Config.from_pretrained(preset_path("kimi-k3"))
    config.num_hidden_layers = depth
    items = stand_in.manifest_items(manifest, depth)
    files = manifest["checkpoint_layout"]["shards"] if depth == manifest["num_layers"] else max(2, depth)
    return config, items, stand_in.build(directory, with_experts(wrapped(config), "mxfp4"), items, files, SEED)


def prepare(directory: Path, manifest: dict[str, Any], depth: int, tokens: int) -> dict[str, Any]:
    """Build the stand-in and fill what the prompt uses; returns what the run needs to know about it."""
    started = time.perf_counter()
    config, items, seeded = build(directory, manifest, depth)
    ids = prompt(config.vocab_size, tokens)
    config._attn_implementation = "sdpa"
    chosen = {}
    for layer in range(1, min(stand_in.REAL_LAYERS, depth)):
        # Which experts a layer uses is known when the layers below it have their values.
        _, used = first_layers(OffsetReader(directory), config, ids, layer + 1)
        chosen[layer] = used[layer][::28]
        stand_in.fill_experts(directory, [stand_in.expert_stem(layer, expert) for expert in chosen[layer]], items, SEED)
    paths = sorted(directory.glob("*.safetensors"))
    return {
        "tensors": len(items),
        "files": len(paths),
        "apparent_bytes": sum(path.stat().st_size for path in paths),
        "disk_bytes": sum(path.stat().st_blocks * 512 for path in paths),
        "build_s": round(time.perf_counter() - started, 1),
        "experts_with_values": {"one of every shard": len(seeded), "used by the prompt": chosen},
        "seeded": seeded,
    }


def load(directory: Path) -> tuple[K3ForCausalLM, dict[str, Any]]:
    """Load as a user would; nothing is asked for."""
    with Watch(0.05) as watch:
        started = time.perf_counter()
        model, info = K3ForCausalLM.from_pretrained(directory, output_loading_info=True)
        seconds = time.perf_counter() - started
    forms = sorted({module.storage for _, module in iter_experts(model)})
    return model, {
        "load_s": round(seconds, 2),
        "loading_info": {name: len(found) for name, found in info.items()},
        "experts_are": forms,
        "parameters": model.num_parameters(),
        "footprint_bytes": model.get_memory_footprint(),
        **watch.result,
    }


@torch.no_grad()
def forward(model: K3ForCausalLM, ids: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """One forward; returns the outputs of the first layers and what was touched."""
    outputs: list[torch.Tensor] = []
    touched: list[int] = []
    times: list[float] = []
    per_expert = {id(m): m.mapped_bytes() / m.num_experts for _, m in iter_experts(model)}
    read = [0.0]

    def after_layer(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        times.append(time.perf_counter())
        if len(outputs) < stand_in.REAL_LAYERS:
            outputs.append(output.clone())
        if len(times) % 10 == 0:
            print(f"layer {len(times)}: {times[-1] - started:.0f} s, {sum(touched)} experts", flush=True)

    def before_experts(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        touched.append(args[1].unique().numel())
        read[0] += touched[-1] * per_expert[id(module)]

    handles = [layer.register_forward_hook(after_layer) for layer in model.model.layers]
    handles += [module.register_forward_pre_hook(before_experts) for _, module in iter_experts(model)]
    with Watch(0.2) as watch:
        started = time.perf_counter()
        logits = model(ids).logits
        seconds = time.perf_counter() - started
    for handle in handles:
        handle.remove()
    steps = [b - a for a, b in zip([started, *times], times, strict=False)]
    return outputs, {
        "forward_s": round(seconds, 1),
        "tokens": ids.shape[1],
        "logits_are_finite": bool(logits.isfinite().all()),
        "logits_std": round(logits.float().std().item(), 4),
        "experts_touched": sum(touched),
        "experts_touched_per_layer": touched,
        "expert_bytes_read": int(read[0]),
        "dense_bytes_read": sum(parameter.nbytes for parameter in model.parameters()),
        "slowest_layer_s": round(max(steps), 2),
        "median_layer_s": round(sorted(steps)[len(steps) // 2], 2),
        **watch.result,
    }


def check(model: K3ForCausalLM, directory: Path, ids: torch.Tensor, outputs: list, seeded: list[str]) -> dict[str, Any]:
    """Compare with the oracle: outputs of the first layers, and the bytes of every expert that has some."""
    reader = OffsetReader(directory)
    expected, _ = first_layers(reader, model.config, ids, len(outputs))
    modules = {name.split(".")[2]: module for name, module in iter_experts(model)}
    wrong = []
    for stem in seeded:
        parts = stem.split(".")
        views = modules[parts[3]].pages.parts(int(parts[6]), ("w1", "w3", "w2"))
        names = [f"{stem}{m}.weight_{kind}" for m in ("w1", "w3", "w2") for kind in ("packed", "scale")]
        wrong += [
            n for n, view in zip(names, views, strict=True) if not torch.equal(view, reader.read(n)) or not view.any()
        ]
    return {
        "layers_equal_to_oracle": [torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)],
        "layer_outputs_std": [round(output.float().std().item(), 4) for output in outputs],
        "experts_compared_by_bytes": len(seeded),
        "experts_that_differ": wrong,
    }


def main() -> int:
    """Run it all and write the report; the exit status says whether the goals were met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="where the stand-in is built; needs about 15 GB")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "full_size.json")
    parser.add_argument("--layers", type=int, default=93, help="fewer for a trial")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--build-only", action="store_true", help="make the stand-in and stop")
    parser.add_argument("--load-only", action="store_true", help="load, write that part of the report, and stop")
    parser.add_argument("--keep", action="store_true", help="do not remove the stand-in")
    options = parser.parse_args()
    manifest = read_manifest()
    directory = options.dir / f"stand-in-{options.layers}"
    note = options.dir / f"stand-in-{options.layers}.json"
    if options.build_only:
        shutil.rmtree(directory, ignore_errors=True)
        note.write_text(json.dumps(prepare(directory, manifest, options.layers, options.tokens)))
        return 0
    if not note.exists():
        # In a process of its own: what building takes must not count as what loading takes.
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--build-only"], check=True)
    built = json.loads(note.read_text())
    print({name: value for name, value in built.items() if name != "seeded"}, flush=True)
    report: dict[str, Any] = {
        "command": f"python benchmarks/full_size.py --layers {options.layers} --dir ...",
        "machine": machine(),
    }
    report["stand_in"] = {name: value for name, value in built.items() if name != "seeded"}
    model, report["load"] = load(directory)
    print(report["load"], flush=True)
    if options.load_only:
        options.out.write_text(json.dumps({**report, "command": report["command"] + " --load-only"}, indent=2) + "\n")
        return int(report["load"]["load_s"] > GOALS["load_s"])
    ids = prompt(model.config.vocab_size, options.tokens)
    outputs, report["forward"] = forward(model, ids)
    report["check"] = check(model, directory, ids, outputs, built["seeded"])
    measured = {
        "load_s": report["load"]["load_s"],
        "load_growth_bytes": report["load"]["peak_grown_resident_bytes"],
        "forward_s": report["forward"]["forward_s"],
        "forward_anonymous_bytes": report["forward"]["peak_anonymous_bytes"],
    }
    report["goals"] = {
        name: {"goal": goal, "measured": measured[name], "met": measured[name] <= goal} for name, goal in GOALS.items()
    }
    right = all(report["check"]["layers_equal_to_oracle"]) and not report["check"]["experts_that_differ"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["goals"], indent=2), json.dumps(report["check"], indent=2), sep="\n")
    if not options.keep:
        shutil.rmtree(directory)
        os.unlink(note)
    return 0 if right and all(goal["met"] for goal in report["goals"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
