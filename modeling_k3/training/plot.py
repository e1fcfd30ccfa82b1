"""How loss, routing and depth develop, as a picture that is drawn anew while a model trains."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_INK, _QUIET, _GRID = "#22262e", "#7d8590", "#e9ebee"
_FIRST, _SECOND, _PALE = "#1f5fa8", "#c4622d", "#a9c1de"
_MOST_LABELS = 24

Log = Sequence[Mapping[str, Any]]


def draw_training(
    path: Path,
    log: Log,
    loads: Mapping[str, Sequence[int]],
    depth: Mapping[str, Sequence[float]],
    *,
    title: str = "training",
) -> None:
    """Draw the figures of a log over its steps, and how experts and depth were used at its last entry.

    Args:
        path: PNG, replaced as a whole so that a viewer never sees half a picture.
        log: entries as the Trainer keeps them; those without a figure, or with one that is no number, are left out of
            its line.
        loads: tokens by expert, for each router by its name; may be empty.
        depth: mean weights of the sources of each mix, by its name; may be empty.
        title: the heading; step and loss of the last entry are added.
    """
    figure = Figure(figsize=(13, 7.2), dpi=110, facecolor="white", layout="constrained")
    (loss, load, experts), (rate, wide, sources) = figure.subplots(2, 3)
    _lines(loss, log, {"loss": "training", "eval_loss": "evaluation"}, title="Loss", smooth=True)
    _lines(
        load,
        [{n: v + 1 if n.endswith("_violation") else v for n, v in entry.items()} for entry in log],
        {"router_max_violation": "worst layer, max / mean", "router_mean_violation": "mean of the layers"},
        title="Load of the experts (1: even)",
        bottom=1.0,
        colors=(_FIRST, _PALE),
    )
    _shares(load, log)
    _lines(rate, log, {"grad_norm": "norm of the gradient"}, title="Gradient and learning rate", bottom=0.0)
    _second_scale(rate, log, "learning_rate", "learning rate")
    _lines(
        wide,
        log,
        {"depth_entropy": "entropy (1: all sources alike)", "depth_largest_weight": "largest weight"},
        title="Attention over depth, mean of all mixes",
        bottom=0.0,
        top=1.02,
    )
    _heat_experts(experts, loads)
    _heat_sources(sources, depth)
    figure.suptitle(_heading(title, log), x=0.01, ha="left", color=_INK, fontsize=13, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(unfinished, format="png")
    unfinished.replace(path)


def _heading(title: str, log: Log) -> str:
    losses = [entry for entry in log if "loss" in entry]
    if not losses:
        return title
    return f"{title}: step {losses[-1].get('step', len(losses)):,}, loss {losses[-1]['loss']:.3f}"


def _points(log: Log, name: str) -> tuple[list[float], list[float]]:
    found = [(entry.get("step", index), entry[name]) for index, entry in enumerate(log, start=1) if name in entry]
    found = [(step, float(value)) for step, value in found if math.isfinite(float(value))]
    return [step for step, _ in found], [value for _, value in found]


def _lines(
    axes: Axes,
    log: Log,
    names: Mapping[str, str],
    *,
    title: str,
    smooth: bool = False,
    bottom: float | None = None,
    top: float | None = None,
    colors: tuple[str, str] = (_FIRST, _SECOND),
) -> None:
    """Lines of up to two figures; with `smooth` the first is shown pale, with its running mean on top."""
    for index, ((name, label), color) in enumerate(zip(names.items(), colors, strict=False)):
        steps, values = _points(log, name)
        if not steps:
            continue
        marker = "o" if len(steps) < 4 else None
        if smooth and index == 0 and len(steps) > 20:
            axes.plot(steps, values, color=_PALE, linewidth=1)
            values = running_mean(values)
        axes.plot(steps, values, color=color, linewidth=1.8, marker=marker, markersize=4, label=label)
    _dress(axes, title)
    axes.set_xlabel("step", color=_QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if not axes.lines:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", color=_QUIET)
        return
    axes.set_ylim(bottom=bottom, top=top)
    axes.legend(frameon=False, fontsize=9)


def running_mean(values: Sequence[float], memory: float = 0.8) -> list[float]:
    """Running mean with a start that is not pulled towards zero."""
    result: list[float] = []
    mean = weight = 0.0
    for value in values:
        mean, weight = memory * mean + (1 - memory) * value, memory * weight + (1 - memory)
        result.append(mean / weight)
    return result


def _second_scale(axes: Axes, log: Log, name: str, label: str) -> None:
    """One more line, with a scale of its own at the right."""
    steps, values = _points(log, name)
    if steps:
        other = axes.twinx()
        other.plot(steps, values, color=_SECOND, linewidth=1.5, linestyle=(0, (5, 3)))
        other.set_ylim(bottom=0)
        other.set_ylabel(label, color=_SECOND, fontsize=9)
        other.tick_params(colors=_SECOND, labelsize=8.5, length=0)
        other.spines[["top", "left", "right", "bottom"]].set_visible(False)


def _shares(axes: Axes, log: Log) -> None:
    """What was dropped, where anything was: most models have no capacity limit."""
    if any(value > 0 for value in _points(log, "router_dropped")[1]):
        _second_scale(axes, log, "router_dropped", "share of dropped places")


def _heat_experts(axes: Axes, loads: Mapping[str, Sequence[int]]) -> None:
    _dress(axes, "Load / mean, last entry")
    rows = [[count * len(row) / max(sum(row), 1) for count in row] for row in loads.values()]
    if _is_empty(axes, rows):
        return
    image = axes.imshow(rows, aspect="auto", cmap="PuOr_r", vmin=0, vmax=2, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, extend="max")
    _name_rows(axes, list(loads), "expert")


def _heat_sources(axes: Axes, depth: Mapping[str, Sequence[float]]) -> None:
    """Sub-layers from top to bottom; the running sum is always the rightmost column, blocks stand before it."""
    _dress(axes, "Weight by source, last entry")
    width = max((len(row) for row in depth.values()), default=0)
    rows = [[*row[:-1], *[math.nan] * (width - len(row)), row[-1]] for row in depth.values()]
    if _is_empty(axes, rows):
        return
    image = axes.imshow(rows, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes)
    _name_rows(axes, list(depth), "source")
    axes.set_xticks(range(width), labels=[*(f"block {i + 1}" for i in range(width - 1)), "sum"])
    if width > 6:
        axes.set_xticks([0, width - 1], labels=["block 1", "sum"])
    if len(rows) * width <= 60:
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                if math.isfinite(value):
                    color = "white" if value > 0.6 else _INK
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)


def _is_empty(axes: Axes, rows: Sequence[Any]) -> bool:
    if not rows:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "none in this model", transform=axes.transAxes, ha="center", color=_QUIET)
    return not rows


def _name_rows(axes: Axes, names: Sequence[str], across: str) -> None:
    axes.grid(visible=False)
    axes.set_xlabel(across, color=_QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    every = -(-len(names) // _MOST_LABELS)
    places = range(0, len(names), every)
    axes.set_yticks(places, labels=[_short(names[place]) for place in places])


def _short(name: str) -> str:
    """A module's name as a label: `model.layers.3.self_attention_res_proj` is `3 attention`."""
    parts = name.split(".")
    layer = next((part for part in parts if part.isdigit()), "")
    part = "output" if "output" in parts[-1] else "mlp" if "mlp" in parts[-1] else "attention"
    return f"{layer} {part}".strip() if name.endswith("_res_proj") else f"layer {layer}"


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=10.5)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, labelsize=8.5, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
