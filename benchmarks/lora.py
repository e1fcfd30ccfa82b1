"""What adapting costs on this machine's CPU: memory and time of a training step, and time against experts in use.

    python benchmarks/lora.py                             five minutes, 7 GB; writes benchmarks/results/lora.*
    python benchmarks/lora.py --only "packed LoRA"        one contender anew: its entry replaces the one in the file

The model is made up: random weights in the released layout, experts of half the release's widths, packed. Each
contender trains its own copy for a few steps in a process of its own, with gradient checkpointing and AdamW:

    packed LoRA    experts stay MXFP4; LoRA on all of them
    mapped LoRA    the same, experts read from the files
    QLoRA          the same as packed, the dense part in NF4
    bf16 LoRA      experts expanded to bf16; LoRA on all of them
    full           everything in bf16 is trained
    release widths packed LoRA on fewer experts of the release's own widths, beside which an adapter is small

Memory is what the process grows by, after a small warm-up of the libraries, from before loading to the worst moment of
training, sampled every 5 ms. Freed memory is given back and compiled products are forgotten early (see ENVIRONMENT);
"default environment" is packed LoRA without that. `use` asks for the same number of tokens with the router held
to fewer and fewer experts, in the default environment, and counts the thread's own time. Packed bytes are those of
the checkpoint.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import Watch, machine

ROOT = Path(__file__).parents[1]
DEFAULT = "default environment"
CONTENDERS = ("packed LoRA", DEFAULT, "mapped LoRA", "QLoRA", "bf16 LoRA", "full", "release widths")
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
}
EXPERTS, TOP_K, RANK = 24, 4, 4
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 5,
    "num_attention_heads": 8, "kv_lora_rank": 256, "q_lora_rank": 384, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "attn_res_block_size": 2, "first_k_dense_replace": 1, "num_experts": EXPERTS,
    "num_experts_per_token": TOP_K, "num_shared_experts": 1, "routed_expert_hidden_size": 1792,
    "moe_intermediate_size": 1536, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RELEASE_WIDTHS = {"num_experts": 16, "routed_expert_hidden_size": 3584, "moe_intermediate_size": 3072}
KINDS = "linear_attention linear_attention linear_attention full_attention full_attention".split()


def make_checkpoint(directory: Path, **changes: Any) -> int:
    """Write a model of SIZES, with changes; return the bytes of its weights."""
    import torch

    from modeling_k3 import K3Config, K3ForCausalLM, K3Mxfp4Config

    torch.manual_seed(0)
    linear = {"num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
    config = K3Config(
        **{**SIZES, **changes}, linear_attn_config={**linear, "use_full_rank_gate": True}, layer_types=KINDS
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    for module in model.modules():
        if hasattr(module, "use_storage"):
            module.use_storage("packed")
    model.to_empty(device="cpu")
    model.init_weights()
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.uint8:
            # A scale at which sums over a row of random codes are of order one.
            codes = torch.randint(0, 256, parameter.shape, dtype=torch.uint8)
            parameter.data.copy_(codes if name.endswith("_packed") else torch.full_like(codes, 120))
        elif parameter.ndim > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    model.config.quantization_config = K3Mxfp4Config()
    model.save_pretrained(directory)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def load(contender: str, directory: Path) -> Any:
    """The contender's model, ready to be trained."""
    import torch
    from peft import get_peft_model

    from modeling_k3 import K3ForCausalLM
    from modeling_k3.adapters import lora_config

    options: dict[str, Any] = {"expert_storage": "dense" if contender in ("bf16 LoRA", "full") else "packed"}
    if contender == "mapped LoRA":
        options["expert_storage"] = "mapped"
    if contender == "QLoRA":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    model = K3ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if contender == "full":
        return model.train()
    return get_peft_model(model, lora_config("experts", r=RANK)).train()


def warm_up() -> None:
    """One step of a small model in bf16: what libraries load and set up is not what is measured."""
    import peft  # noqa: F401
    import torch

    from modeling_k3 import K3Config, K3ForCausalLM

    small = {"hidden_size": 64, "intermediate_size": 64, "routed_expert_hidden_size": 64, "moe_intermediate_size": 64}
    linear = {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
    config = K3Config(
        **{**SIZES, **small}, linear_attn_config={**linear, "use_full_rank_gate": True}, layer_types=KINDS
    )
    model = K3ForCausalLM(config).bfloat16()
    ids = torch.randint(3, 100, (1, 64))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.optim.AdamW(model.parameters(), foreach=False).step()


def use_first(model: Any, count: int) -> None:
    """Hold every router to its first experts."""
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias[:] = -1e4
            module.e_score_correction_bias[:count] = 0


def run_contender(contender: str, directory: Path, tokens: int, steps: int) -> dict[str, Any]:
    """Train; what it took."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    warm_up()
    ids = torch.randint(3, SIZES["vocab_size"], (1, tokens))
    seconds, losses = [], []
    with Watch(0.005) as watch:
        model = load(contender, directory)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=False)
        for _ in range(steps):
            started = time.perf_counter()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - started)
            losses.append(loss.item())
    return {
        "trained_parameters": sum(parameter.numel() for parameter in trained),
        "adapter_state_bytes": sum(4 * parameter.nbytes for parameter in trained),
        "peak_bytes": watch.result["peak_grown_resident_bytes"],
        "peak_anonymous_bytes": watch.result["peak_grown_anonymous_bytes"],
        "step_s": round(statistics.median(seconds[1:]), 3),
        "losses": [round(loss, 4) for loss in losses],
    }


def run_use(directory: Path, tokens: int) -> dict[str, Any]:
    """CPU seconds of forward and backward against experts in use, the number of tokens held."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = load("packed LoRA", directory)
    model.base_model.model.gradient_checkpointing_disable()
    ids = torch.randint(3, SIZES["vocab_size"], (1, tokens))
    rows = []
    for count in (4, 8, 12, 16, 20, 24, 4):
        use_first(model, count)
        seen: list[int] = []
        hooks = [
            module.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(len(args[1].unique())))
            for module in model.modules()
            if type(module).__name__ == "K3ExpertsLora"
        ]
        seconds = []
        for _ in range(4):
            seen.clear()
            started = time.process_time()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            seconds.append(time.process_time() - started)
        for hook in hooks:
            hook.remove()
        rows.append({"experts_in_use": sum(seen), "seconds": round(min(seconds[1:]), 4)})
    rows = rows[1:]  # The first warmed up; the last measures the same.
    return {"tokens": tokens, "rows": sorted(rows, key=lambda row: row["experts_in_use"]), **fit(rows)}


def fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The straight line through the measurements, and how much of their variance it explains."""
    x, y = [row["experts_in_use"] for row in rows], [row["seconds"] for row in rows]
    slope, intercept = statistics.linear_regression(x, y)
    return {
        "seconds_per_expert": round(slope, 5),
        "seconds_without": round(intercept, 4),
        "r_squared": round(statistics.correlation(x, y) ** 2, 5),
    }


def in_process(arguments: list[str]) -> Any:
    """Run a part of this file in a process of its own."""
    environment = {**os.environ, **({} if {"use", DEFAULT} & {*arguments} else ENVIRONMENT)}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def draw(report: dict[str, Any], path: Path) -> None:
    """Memory by contender, and time against experts in use."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names = list(report["contenders"])
    places = range(len(names))
    packed = [report["contenders"][name]["checkpoint_bytes"] / 1e9 for name in names]
    peaks = [report["contenders"][name]["peak_bytes"] / 1e9 for name in names]
    left.barh(places, peaks, color="#4477aa", height=0.7)
    # Taller than its bar, so that it is seen where the two are close.
    left.vlines(packed, [n - 0.45 for n in places], [n + 0.45 for n in places], color="#cc3311", lw=2)
    for place, peak, size in zip(places, peaks, packed, strict=True):
        left.annotate(
            f"{peak:.2f} GB, {peak / size:.2f} x",
            (peak, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=10,
        )  # fmt: skip
    left.set_yticks(places, names, fontsize=10)
    left.set(xlim=(0, max(peaks) * 1.45), xlabel="GB")
    left.invert_yaxis()
    left.set_title("peak memory of training; red: packed checkpoint", fontsize=11)
    rows = report["use"]["rows"]
    right.plot([r["experts_in_use"] for r in rows], [r["seconds"] for r in rows], "o", color="#4477aa")
    top = max(r["experts_in_use"] for r in rows)
    line = [report["use"]["seconds_without"] + report["use"]["seconds_per_expert"] * x for x in (0, top)]
    right.plot([0, top], line, color="#4477aa", lw=1)
    right.set(xlabel="experts in use, all layers", ylabel="CPU seconds")
    right.set_title(f"forward and backward of {report['use']['tokens']} tokens", fontsize=11)
    right.set_xlim(0)
    right.set_ylim(0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "lora")
    parser.add_argument("--only", choices=[*CONTENDERS, "use"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--note", default="", help="what else the machine did, for the report")
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "make":
        print(json.dumps(make_checkpoint(options.checkpoint)))
    elif options.part == "make wide":
        print(json.dumps(make_checkpoint(options.checkpoint, **RELEASE_WIDTHS)))
    elif options.part == "use":
        print(json.dumps(run_use(options.checkpoint, 16)))
    elif options.part:
        print(json.dumps(run_contender(options.part, options.checkpoint, options.tokens, options.steps)))
    if options.part:
        return
    sizes = ["--tokens", str(options.tokens), "--steps", str(options.steps)]
    report: dict[str, Any] = {"tokens": options.tokens, "rank": RANK, "environment": ENVIRONMENT, "contenders": {}}
    place_of_report = options.out.with_suffix(".json")
    if options.only is not None:
        report = json.loads(place_of_report.read_text())
        if (report["tokens"], report["rank"]) != (options.tokens, RANK):
            parser.error(f"--only: {place_of_report} is about {report['tokens']} tokens and rank {report['rank']}")
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as wide:
        made: dict[str, int] = {}
        for name in (*CONTENDERS, "use"):
            if options.only not in (None, name):
                continue
            place, make = (wide, "make wide") if name == "release widths" else (scratch, "make")
            common = [*sizes, "--checkpoint", place]
            if make not in made:
                made[make] = in_process(["--part", make, *common])
            found = in_process(["--part", name, *common])
            if options.only is not None and options.note:
                found["note"] = options.note
            if name == "use":
                report["use"] = found
            else:
                found["checkpoint_bytes"] = made[make]
                found["peak_over_checkpoint"] = round(found["peak_bytes"] / made[make], 3)
                report["contenders"][name] = found
            print(name, json.dumps(found), flush=True)
    if options.only is None:
        report |= {"machine": machine(), "note": options.note}
    report["contenders"] = {name: report["contenders"][name] for name in CONTENDERS if name in report["contenders"]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    place_of_report.write_text(json.dumps(report, indent=2) + "\n")
    draw(report, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
