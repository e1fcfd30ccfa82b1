"""A training step (forward and backward) in bf16 on this machine's CPU, beside transformers' native Kimi Linear.

    python benchmarks/train_step.py                       # 552 M, minutes; nothing else should run meanwhile
    python benchmarks/train_step.py --layers 4 --rounds 1

Four contenders, each in a process of its own, which take turns: our 552 M model; native Kimi Linear of the same widths
without latent (903 M); and one identical Kimi Linear configuration in both classes. What breaks the native class on a
CPU is blocked before it is imported. Writes train_step.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import machine

CONTENDERS = ("ours", "native", "ours, Kimi Linear", "native, Kimi Linear")
GOALS = {("ours", "native"): 10.0, ("ours, Kimi Linear", "native, Kimi Linear"): 6.0}
#: Widths that all contenders share.
WIDTHS: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "kv_lora_rank": 256,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS, WIDTH, TAPS, EXPERTS, TOP_K, SHARED = 8, 128, 4, 32, 4, 2


def kinds(layers: int) -> list[str]:
    """Full attention in every fourth layer."""
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]


def our_config(layers: int, is_kimi_linear: bool) -> Any:
    """The 552 M shape; or the same without what Kimi Linear does not have."""
    from modeling_k3 import K3Config

    linear = {"num_heads": HEADS, "head_dim": WIDTH, "short_conv_kernel_size": TAPS}
    k3: dict[str, Any] = {
        "q_lora_rank": 384, "routed_expert_hidden_size": 512, "latent_moe_use_norm": True, "attn_res_block_size": 4,
    }  # fmt: skip
    linear.update(use_full_rank_gate=True, gate_lower_bound=-5.0)
    if is_kimi_linear:
        k3 = {
            "q_lora_rank": None, "routed_expert_hidden_size": None, "latent_moe_use_norm": False, "hidden_act": "silu",
            "attn_res_block_size": None, "mla_use_output_gate": False, "activation_situ_beta": None,
            "activation_situ_linear_beta": None,
        }  # fmt: skip
        linear.update(use_full_rank_gate=False, gate_lower_bound=None)
    return K3Config(
        **WIDTHS, **k3, num_hidden_layers=layers, num_experts=EXPERTS, num_experts_per_token=TOP_K,
        num_shared_experts=SHARED, linear_attn_config=linear, layer_types=kinds(layers),
    )  # fmt: skip


def build(contender: str, layers: int) -> Any:
    """A contender's model in bf16, in training mode, freshly initialised."""
    import torch

    torch.manual_seed(0)
    if contender.startswith("ours"):
        from modeling_k3 import K3ForCausalLM

        model = K3ForCausalLM(our_config(layers, "Kimi Linear" in contender))
    else:
        for blocked in ("triton", "fla", "kernels"):
            sys.modules[blocked] = None
        from transformers import AutoModelForCausalLM
        from transformers.models.kimi_linear import KimiLinearConfig

        config = KimiLinearConfig(
            **WIDTHS, num_hidden_layers=layers, linear_head_dim=WIDTH, linear_num_heads=HEADS,
            layer_types=kinds(layers), linear_conv_kernel_dim=TAPS,
            num_experts=EXPERTS, num_experts_per_token=TOP_K, num_shared_experts=SHARED,
            routed_scaling_factor=1.0, q_lora_rank=None if "Kimi Linear" in contender else 384,
            mlp_layer_types=["dense"] + ["sparse"] * (layers - 1), num_key_value_heads=HEADS,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    return model.to(torch.bfloat16).train()


def work(contender: str, layers: int, tokens: int, steps: int) -> dict[str, Any]:
    """Time a few steps of one contender; the first one is not counted."""
    import torch

    model = build(contender, layers)
    ids = torch.randint(3, WIDTHS["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
    seconds, forwards = [], []
    for _ in range(steps + 1):
        model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        middle = time.perf_counter()
        loss.backward()
        seconds.append(time.perf_counter() - begin)
        forwards.append(middle - begin)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": round(loss.item(), 4),
        "seconds": seconds[1:],
        "forward_seconds": forwards[1:],
        "finite": all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None),
    }


def ask(contender: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run `work` in a process of its own."""
    command = [sys.executable, __file__, "--worker", contender, "--layers", str(arguments.layers)]
    command += ["--tokens", str(arguments.tokens), "--steps", str(arguments.steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    # Until the system has taken back and cleared the memory of the one before.
    time.sleep(10)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{contender} stopped with exit status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Let the contenders take turns and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "train_step.json")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="timed steps in each turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each contender")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(work(arguments.worker, arguments.layers, arguments.tokens, arguments.steps)))
        return
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(arguments.rounds):
        for name in CONTENDERS:
            turns[name].append(ask(name, arguments))
            print(f"{name:20} {arguments.tokens / min(turns[name][-1]['seconds']):8.1f} tokens/s", flush=True)
    results = {}
    for name, rows in turns.items():
        seconds = statistics.median(second for row in rows for second in row["seconds"])
        forward = statistics.median(second for row in rows for second in row["forward_seconds"])
        rate = {"tokens_per_second": round(arguments.tokens / seconds, 2), "forward_share": round(forward / seconds, 3)}
        results[name] = {**rate, "parameters": rows[0]["parameters"], "finite": rows[0]["finite"], "turns": rows}
    ratios = {}
    for (ours, native), goal in GOALS.items():
        ratio = results[ours]["tokens_per_second"] / results[native]["tokens_per_second"]
        ratios[f"{ours} / {native}"] = {"ratio": round(ratio, 2), "goal": goal}
    setting = {
        "layers": arguments.layers,
        "tokens": arguments.tokens,
        "dtype": "bfloat16",
        "threads": arguments.threads,
    }
    report = {"machine": machine(), "setting": setting, "results": results, "ratios": ratios}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, row in ratios.items():
        print(f"{name}: {row['ratio']} (goal {row['goal']})")


if __name__ == "__main__":
    main()
