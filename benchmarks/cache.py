"""The cache on this machine's CPU: decode over context, prefix reuse, memory of a long prefill, compiled steps.

    python benchmarks/cache.py                              a quarter of an hour; writes benchmarks/results/cache.*
    python benchmarks/cache.py --short --out runs/cache     a few minutes

    decode     time per token at contexts of 1k to 32k: MLA absorbed and expanded, KDA only, and transformers' Kimi
               Linear with equal dimensions; caches are filled with random numbers, which cost the same
    memory     bytes of those caches
    prefix     prefill of a prompt that shares 3/4 with a known one, against the whole prefill
    prefill    peak memory of a prefill in pieces, without the latents, at several lengths (pico, and a KDA-only twin)
    compile    a decode step eager and through inductor

Every measurement runs in a process of its own. Reported are medians of steps after a warm-up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import machine

ROOT = Path(__file__).parents[1]
CONTENDERS = ("absorbed", "expanded", "KDA only", "transformers Kimi Linear")
KINDS = "linear_attention linear_attention linear_attention full_attention".split() * 2
#: Dimensions of the decode models: the release's ratios at a width of 1024, dense feed-forward.
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 16, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "q_lora_rank": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS, WIDTH, TAPS = 16, 64, 4


# -- one measurement, in a process of its own -----------------------------------------------------------------------


def our_model(only_kda: bool = False) -> Any:
    """A K3 model of SIZES."""
    from modeling_k3 import K3Config, K3ForCausalLM

    linear = {"num_heads": HEADS, "head_dim": WIDTH, "short_conv_kernel_size": TAPS, "gate_lower_bound": -5.0}
    kinds = ["linear_attention"] * 8 if only_kda else KINDS
    config = K3Config(
        **SIZES, num_experts=None, linear_attn_config={**linear, "use_full_rank_gate": True}, layer_types=kinds
    )
    return K3ForCausalLM(config).eval().requires_grad_(False)


def native_model() -> Any:
    """transformers' Kimi Linear of SIZES; what breaks it on a CPU is blocked."""
    for blocked in ("triton", "fla", "kernels"):
        sys.modules[blocked] = None
    from transformers import AutoModelForCausalLM
    from transformers.models.kimi_linear import KimiLinearConfig

    config = KimiLinearConfig(
        **SIZES, linear_head_dim=WIDTH, linear_num_heads=HEADS, linear_conv_kernel_dim=TAPS, layer_types=KINDS,
        mlp_layer_types=["dense"] * 8,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def fill(cache: Any, length: int) -> None:
    """Replace the latents of a cache that has seen one token by `length` random ones."""
    import torch

    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = (
                torch.randn(*x.shape[:2], length, x.shape[-1], dtype=x.dtype) for x in (layer.keys, layer.values)
            )
        elif hasattr(layer, "_seen"):
            layer._seen = torch.empty(length, 0)


def held_bytes(cache: Any) -> int:
    """Bytes of all tensors in a cache of either kind."""
    total = 0
    for layer in cache.layers:
        held = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for name in ("conv_states", "recurrent_states"):
            held += list((getattr(layer, name, None) or {}).values())
        total += sum(x.nbytes for x in held if x is not None)
    return total


def decode(contender: str, lengths: list[int], steps: int) -> list[dict[str, Any]]:
    """Median time of a decode step at each context length."""
    import torch

    from modeling_k3 import mla

    if contender == "expanded":
        mla.prefers_absorbed = lambda *_: False
    model = native_model() if contender.startswith("transformers") else our_model(contender == "KDA only")
    rows, token = [], torch.tensor([[7]])
    with torch.no_grad():
        for length in lengths:
            cache = model(token, use_cache=True).cache
            fill(cache, length)
            seconds = []
            for _ in range(steps + 2):
                begin = time.perf_counter()
                model(token, cache=cache, use_cache=True)
                seconds.append(time.perf_counter() - begin)
            row = {"contender": contender, "context": length, "milliseconds": statistics.median(seconds[2:]) * 1e3}
            rows.append({**row, "cache_bytes": held_bytes(cache), "steps": steps})
    return rows


def prefix(length: int, turns: int) -> list[dict[str, Any]]:
    """Prefill of prompts that share their first three quarters."""
    import torch

    from modeling_k3 import PrefixCache

    model, prefixes = our_model(), PrefixCache(block_size=length // 8)
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, 4096, (1, length * 3 // 4), generator=generator)
    times: dict[str, list[float]] = {"whole": [], "reused": []}
    options = {"max_new_tokens": 1, "do_sample": False}
    model.generate(shared, prefix_cache=prefixes, **options)
    for _ in range(turns):
        prompt = torch.cat([shared, torch.randint(3, 4096, (1, length // 4), generator=generator)], dim=1)
        for name, extra in (("whole", {}), ("reused", {"prefix_cache": prefixes})):
            begin = time.perf_counter()
            model.generate(prompt, **extra, **options)
            times[name].append(time.perf_counter() - begin)
    whole, reused = (statistics.median(times[name]) for name in ("whole", "reused"))
    row = {"prompt": length, "shared": length * 3 // 4, "whole_seconds": whole, "reused_seconds": reused}
    return [{**row, "share_of_whole": reused / whole, **prefixes.stats()}]


def prefill(kind: str, length: int) -> list[dict[str, Any]]:
    """Peak memory of a prefill in pieces over what stood before, without the latents."""
    import gc

    import torch

    from modeling_k3 import K3Cache, K3Config, K3ForCausalLM
    from modeling_k3.configuration import preset_path

    config = K3Config.from_pretrained(preset_path("pico"))
    if kind == "KDA only":
        config.layer_types = ["linear_attention"] * config.num_hidden_layers
    model = K3ForCausalLM(config).float().eval().requires_grad_(False)
    ids = torch.randint(3, 500, (1, length), generator=torch.Generator().manual_seed(0))
    model.generate(ids[:, :4096], max_new_tokens=1, do_sample=False)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, cache, begin = _memory("VmRSS"), K3Cache(config), time.perf_counter()
    model.generate(ids, cache=cache, max_new_tokens=1, do_sample=False)
    seconds, sizes = time.perf_counter() - begin, cache.nbytes()
    extra = _memory("VmHWM") - before - sizes["latent"] - sizes["reserved"]
    row = {"kind": kind, "tokens": length, "seconds": seconds, "latent_bytes": sizes["latent"]}
    return [{**row, "peak_without_latents_bytes": extra}]


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def compiled(context: int, steps: int) -> list[dict[str, Any]]:
    """A decode step eager and through inductor, in turns."""
    import torch
    from torch._dynamo.utils import counters

    model, token, times = our_model(), torch.tensor([[7]]), {}
    with torch.no_grad():
        for name, step in (("eager", model), ("inductor", torch.compile(model, fullgraph=True))):
            cache, seconds = model(token, use_cache=True).cache, []
            fill(cache, context)
            for _ in range(steps + 4):
                begin = time.perf_counter()
                step(token, cache=cache, use_cache=True)
                seconds.append(time.perf_counter() - begin)
            times[name] = statistics.median(seconds[4:]) * 1e3
    row: dict[str, Any] = {f"{name}_milliseconds": value for name, value in times.items()}
    breaks = sum(counters["graph_break"].values())
    return [{**row, "context": context, "graph_breaks": breaks, "speed_up": times["eager"] / times["inductor"]}]


# -- all of them ------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "decode": decode, "prefix": prefix, "prefill": prefill, "compile": compiled,
}  # fmt: skip


def plan(short: bool) -> list[tuple[str, list[Any]]]:
    """The measurements to make."""
    lengths = [1024, 4096, 16384] if short else [1024, 2048, 4096, 8192, 16384, 32768]
    steps = 5 if short else 20
    decodes = [("decode", [contender, lengths, steps]) for contender in CONTENDERS]
    kinds = [("hybrid", n) for n in ((4096, 16384) if short else (16384, 131072))]
    kinds += [("KDA only", n) for n in ((16384, 65536) if short else (16384, 1048576))]
    others = [("prefix", [1024 if short else 8192, 3]), ("compile", [1024, 10 if short else 40])]
    return [*decodes, *others, *(("prefill", list(kind)) for kind in kinds)]


def run(part: str, arguments: list[Any], threads: int) -> list[dict[str, Any]]:
    """Make one measurement in a process of its own."""
    command = [sys.executable, __file__, "--worker", json.dumps([part, arguments])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return [{"part": part, "arguments": arguments, "failed": done.stderr.strip().splitlines()[-1:]}]
    return [{"part": part, **row} for row in json.loads(done.stdout.splitlines()[-1])]


def table(rows: list[dict[str, Any]]) -> str:
    """One Markdown table for each part."""
    lines: list[str] = []
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        names = list(dict.fromkeys(name for row in own for name in row if name != "part"))
        lines += [f"**{part}**", "", "| " + " | ".join(names) + " |", "| " + " | ".join("---:" for _ in names) + " |"]
        for row in own:
            cells = [row.get(name, "") for name in names]
            lines.append("| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of a decode step over the length of the context, one line for each contender."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).subplots()
    for contender in CONTENDERS:
        own = [row for row in rows if row.get("contender") == contender and "milliseconds" in row]
        if own:
            axes.plot(
                [row["context"] for row in own], [row["milliseconds"] for row in own], marker="o", label=contender
            )
    axes.set(
        xscale="log", yscale="log", xlabel="tokens of context", ylabel="milliseconds for each new token",
        title="Decode, batch 1: 8 layers, six of them KDA",
    )  # fmt: skip
    contexts = sorted({row["context"] for row in rows if row["part"] == "decode" and "context" in row})
    axes.set_xticks(contexts, [f"{n // 1024}k" for n in contexts], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def write(report: dict[str, Any], out: Path) -> None:
    """Write `cache.json`, `cache.md` and, where decoding was measured, `cache.png`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "cache.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "cache.md").write_text(table(report["rows"]), encoding="utf-8")
    if any(row["part"] == "decode" for row in report["rows"]):
        plot(report["rows"], out / "cache.png")


def main() -> None:
    """Run the plan, print the tables and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--short", action="store_true", help="fewer lengths and steps")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        part, arguments = json.loads(options.worker)
        print(json.dumps(PARTS[part](*arguments)))
        return
    rows = []
    for part, arguments in plan(options.short):
        if options.only in (None, part):
            rows += run(part, arguments, options.threads)
            print(json.dumps(rows[-1]), flush=True)
    date = time.strftime("%Y-%m-%d")
    command = " ".join(["python benchmarks/cache.py", *sys.argv[1:]])
    write(
        {"command": command, "date": date, "machine": {**machine(), "threads": options.threads}, "rows": rows},
        options.out,
    )
    print(table(rows))


if __name__ == "__main__":
    main()
