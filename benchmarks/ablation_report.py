"""The table and the picture of `ablations.py`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Rows = Mapping[str, Mapping[str, Any]]
_COLORS = ["#22262e", "#1f5fa8", "#c4622d", "#3f8f5b"]
#: What one has to know to read a group's table.
REMARKS = {
    "attention": "Full attention has no positions of its own (NoPE): alone it knows only what the causal mask tells.",
    "attn_res": "The model has four layers of two sub-layers each, so blocks of 4 are the whole depth.",
    "routing": "The latent has 3/8 of the width, so the router itself is smaller.",
    "latent": (
        "Neither parameters nor compute are equal: see the last two columns. Without a latent there are no projections "
        "and no norm around the experts."
    ),
    "balancing": "Balancing is for the load: on several devices, everyone waits for the expert with the most tokens.",
    "capacity": "Places beyond the limit are dropped in training only; held-out text is computed without a limit.",
    "gate": "Each gate begins as published: exp(A_log) is 1 for the bounded one, uniform in 1 to 16 for softplus.",
    "seeds": "The same model and the same work: smaller differences in loss or speed in the other tables mean nothing.",
}
_HEAD = (
    "| variant | held-out bits/byte | against baseline | tokens per CPU s | peak MB | load max/mean | dropped "
    "| parameters | used per token |"
)


def members(
    group: str, groups: Mapping[str, Any], baseline_is: Mapping[str, str], rows: Rows
) -> list[tuple[str, Mapping[str, Any]]]:
    """The finished runs of a group as (name, row), the baseline first under its name in this group."""
    first = [(baseline_is[group], rows["baseline"])] if "baseline" in rows else []
    return first + [(name, rows[name]) for name in groups[group] if name in rows]


def table(names: Sequence[str], groups: Mapping[str, Any], baseline_is: Mapping[str, str], rows: Rows) -> str:
    """One Markdown table for each group."""
    parts = []
    for group in names:
        lines = [f"### {group}", "", _HEAD, "|---|" + "---:|" * 8]
        for name, row in members(group, groups, baseline_is, rows):
            lines.append(_line(name, row, rows["baseline"]))
        parts.append("\n".join([*lines, "", REMARKS[group]]))
    return "\n\n".join(parts) + "\n"


def _line(name: str, row: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    bits = row["held_out_bits_per_byte"]
    cells = [
        name if row is not baseline else f"**{name}** (baseline)",
        f"{bits:.3f}",
        "" if row is baseline else f"{bits - baseline['held_out_bits_per_byte']:+.3f}",
        f"{row['tokens_per_cpu_second']:,}",
        f"{row['peak_megabytes']:,.0f}",
        f"{row['load_max_over_mean']:.2f}",
        f"{row['dropped']:.1%}",
        f"{row['parameters']['total']:,}",
        f"{row['parameters']['active']:,}",
    ]
    return "| " + " | ".join(cells) + " |"


def draw(
    path: Path, names: Sequence[str], groups: Mapping[str, Any], baseline_is: Mapping[str, str], rows: Rows
) -> None:
    """All runs as points by group, with the spread of the seeds behind them, and the load where it is the question."""
    figure = Figure(figsize=(12, 7), dpi=120, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    _points(left, names, groups, baseline_is, rows)
    _loads(right, groups, baseline_is, rows)
    figure.suptitle("Ablations at pico size: one run each, same text, budget and seed", fontsize=12)
    figure.savefig(path)


def _points(axes: Axes, names: Sequence[str], groups: Any, baseline_is: Any, rows: Rows) -> None:
    at, ticks, labels = 0.0, [], []
    seeds = [row["held_out_bits_per_byte"] for _, row in members("seeds", groups, baseline_is, rows)]
    if len(seeds) > 1:
        axes.axvspan(min(seeds), max(seeds), color="#e9ebee", label="baseline, all seeds")
    left, right = _range([rows[name]["held_out_bits_per_byte"] for name in rows], rows["baseline"])
    for group in names:
        for index, (name, row) in enumerate(members(group, groups, baseline_is, rows)):
            bits, color = row["held_out_bits_per_byte"], _COLORS[0] if index == 0 else _COLORS[1]
            # A run far outside would press all others together: an arrow at the edge stands for it.
            is_inside = bits <= right
            axes.plot(min(bits, right), at, "o" if is_inside else ">", color=color, markersize=6, clip_on=False)
            place, side = ((7, -3), "left") if is_inside else ((-7, -3), "right")
            axes.annotate(
                f"{bits:.3f}", (min(bits, right), at), xytext=place, textcoords="offset points", ha=side, fontsize=8
            )
            ticks.append(at)
            labels.append(name)
            at += 1
        at += 0.7
    axes.axvline(rows["baseline"]["held_out_bits_per_byte"], color=_COLORS[0], linewidth=0.8, label="baseline")
    axes.set_xlim(left, right)
    axes.set_yticks(ticks, labels=labels)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e9ebee")
    axes.set_axisbelow(True)
    axes.set(xlabel="held-out bits per byte (left is better)")
    axes.legend(frameon=False, fontsize=8)


def _range(bits: Sequence[float], baseline: Mapping[str, Any]) -> tuple[float, float]:
    """From the best run to the worst one that is not three times as far from the baseline as the one before it."""
    centre = baseline["held_out_bits_per_byte"]
    above = sorted(value - centre for value in bits)
    while len(above) > 2 and above[-1] > 3 * max(above[-2], -above[0], 0.01):
        above.pop()
    width = max(above[-1] - above[0], 0.01)
    return centre + above[0] - 0.1 * width, centre + above[-1] + 0.25 * width


def _loads(axes: Axes, groups: Any, baseline_is: Any, rows: Rows) -> None:
    for (name, row), color in zip(members("balancing", groups, baseline_is, rows), _COLORS, strict=False):
        axes.plot(range(1, len(row["loads"]) + 1), row["loads"], color=color, label=name, linewidth=1.4)
    axes.set(title="Load of the worst layer, by step", xlabel="step", ylabel="max / mean", yscale="log")
    axes.set_yticks([1, 1.5, 2, 3, 4, 6, 8, 12, 16], labels=["1", "1.5", "2", "3", "4", "6", "8", "12", "16"])
    axes.minorticks_off()
    axes.grid(color="#e9ebee")
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)
