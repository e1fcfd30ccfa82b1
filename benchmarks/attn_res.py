"""AttnRes beside plain residuals: training at high learning rates, and what is kept for the backward pass.

    python benchmarks/attn_res.py

Small byte models without experts, equal but for the residual stream, on the Python standard library's sources. For each
learning rate: the loss, and after training the size of the stream in each layer. Writes attn_res.json and attn_res.png.
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measure import machine
from torch import Tensor

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.training.depth_stats import DepthWatch, summarise_depth

STREAMS = {"AttnRes": 2, "plain residuals": None}
COLORS = {"AttnRes": "#1f5fa8", "plain residuals": "#c4622d"}


def build(block: int | None, layers: int = 8, width: int = 96) -> K3ForCausalLM:
    """A byte model with MLA in every fourth layer."""
    torch.manual_seed(0)
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    linear = {"num_heads": 3, "head_dim": 32, "short_conv_kernel_size": 4}
    config = K3Config(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_experts=None,
        num_attention_heads=3, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32, layer_types=kinds,
        attn_res_block_size=block, linear_attn_config={**linear, "use_full_rank_gate": True, "gate_lower_bound": -5.0},
    )  # fmt: skip
    return K3ForCausalLM(config).train()


def corpus() -> Tensor:
    """Bytes of the standard library's modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch(text: Tensor, step: int, rows: int, length: int) -> Tensor:
    """Random windows [rows, length] that depend on the step alone."""
    starts = torch.randint(len(text) - length, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def train(block: int | None, lr: float, arguments: argparse.Namespace, text: Tensor) -> dict[str, Any]:
    """Train one model without warm-up or decay; bits per byte, norms of the gradient, sizes of the stream."""
    model = build(block)
    watch, began = DepthWatch(model), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    bits, norms, depth, broke_at = [], [], [], None
    for step in range(arguments.steps):
        ids = batch(text, step, arguments.rows, arguments.length)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        if not (math.isfinite(loss.item()) and math.isfinite(norm)):
            broke_at = step
            break
        optimizer.step()
        optimizer.zero_grad()
        bits.append(round(loss.item() / math.log(2), 4))
        norms.append(round(norm, 4))
        depth.append(summarise_depth(watch.take()))
    watch.close()
    model.eval()
    with torch.no_grad():
        ids = batch(text, 10**6, 16, arguments.length)
        output = model(ids, labels=ids, output_hidden_states=True, use_cache=False)
    # The last entry is normalised.
    stream = [round(h.square().mean().sqrt().item(), 4) for h in output.hidden_states[:-1]]
    return {
        "bits": bits,
        "gradient_norms": norms,
        "held_out_bits": round(output.loss.item() / math.log(2), 4),
        "worst_rise": worst_rise(bits),
        "broke_at": broke_at,
        "stream_rms": stream,
        "depth": depth[-1],
        "seconds": round(time.perf_counter() - began, 1),
    }


def worst_rise(bits: list[float]) -> float:
    """How far the smoothed loss ever climbs above its lowest value so far: 0 for a run that only falls."""
    smooth = _smooth(bits, 16)[16:]
    return round(max((value - min(smooth[: i + 1]) for i, value in enumerate(smooth)), default=0.0), 4)


def saved_bytes(block: int | None, layers: int, tokens: int = 128) -> int:
    """Bytes that autograd keeps of one forward, beside the parameters, each storage once.

    As in `tests/unit/test_attn_res_memory.py`: benchmarks and tests do not import each other.
    """
    model, kept = build(block, layers), {}
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids, use_cache=False).loss
    size = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in known)
    return size if loss.isfinite() else 0


def draw(path: Path, runs: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Loss over steps for each rate, and the size of the stream over depth at the highest one where both learn."""
    height = -(-(len(runs) + 1) // 4)
    figure = Figure(figsize=(16, 4 * height), dpi=90, facecolor="white", layout="constrained")
    places = figure.subplots(height, 4).flatten()
    for axes in places[len(runs) + 1 :]:
        axes.set_axis_off()
    for axes, (rate, streams) in zip(places, runs.items(), strict=False):
        for name, run in streams.items():
            _line(axes, _smooth(run["bits"]), name)
        top = max(9.0, *(1.3 * run["bits"][-1] for run in streams.values()))
        axes.set(title=f"learning rate {rate}", xlabel="step", ylabel="bits per byte", ylim=(2, top))
        if all(run["held_out_bits"] < 8 for run in streams.values()):
            highest = rate
    for name, run in runs[highest].items():
        _line(places[len(runs)], run["stream_rms"], name)
    places[len(runs)].set(title=f"stream at rate {highest}", xlabel="layer", ylabel="RMS", yscale="log")
    places[0].legend(frameon=False)
    figure.savefig(path)


def _line(axes: Axes, values: list[float], name: str) -> None:
    axes.plot(values, color=COLORS[name], label=name, linewidth=1.5)
    axes.grid(color="#e9ebee")


def _smooth(values: list[float], span: int = 8) -> list[float]:
    return [sum(values[max(0, i - span + 1) : i + 1]) / min(i + 1, span) for i in range(len(values))]


def main() -> None:
    """Train every pair, measure memory, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rates", type=float, nargs="*", default=[3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0])
    parser.add_argument("--add", action="store_true", help="keep the file's other rates; an empty --rates keeps all")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    place, text, runs = arguments.out / "attn_res.json", corpus(), {}
    setting = {name: getattr(arguments, name) for name in ("steps", "rows", "length")}
    if arguments.add:
        old = json.loads(place.read_text())
        if old["setting"] != setting:
            parser.error(f"--add: {place} has {old['setting']}")
        runs = old["runs"]
    for rate in arguments.rates:
        runs[str(rate)] = {name: train(block, rate, arguments, text) for name, block in STREAMS.items()}
        for name, run in runs[str(rate)].items():
            print(rate, name, {key: run[key] for key in ("held_out_bits", "worst_rise", "broke_at", "seconds")})
    runs = dict(sorted(runs.items(), key=lambda item: float(item[0])))
    memory = {name: {str(n): saved_bytes(block, n) for n in (8, 16, 32)} for name, block in STREAMS.items()}
    print("kept for backward", memory)
    report = {"machine": machine(), "setting": setting, "runs": runs, "saved_bytes_by_depth": memory}
    place.write_text(json.dumps(report) + "\n")
    draw(arguments.out / "attn_res.png", runs)


if __name__ == "__main__":
    main()
