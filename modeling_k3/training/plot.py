"""How routing and depth developed, as a picture."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_FIRST, _SECOND, _GRID = "#1f5fa8", "#c4622d", "#e9ebee"


def draw_training(path: Path, log: Sequence[dict[str, Any]], loads: Sequence[Sequence[int]]) -> None:
    """Draw the figures of a log over its steps, and the load of every expert at its last entry.

    Args:
        path: PNG, replaced as a whole so that a viewer never sees half a picture.
        log: entries as the Trainer keeps them; those without a figure are left out of its line.
        loads: tokens by expert, one row for each MoE layer; may be empty.
    """
    figure = Figure(figsize=(9, 6), dpi=120, facecolor="white", layout="constrained")
    places = figure.subplots(2, 2)
    _lines(places[0, 0], log, {"loss": "loss"})
    _lines(places[0, 1], log, {"router_max_violation": "worst layer's max / mean - 1", "router_dropped": "dropped"})
    _lines(places[1, 0], log, {"router_entropy": "entropy of the experts", "depth_entropy": "entropy over depth"})
    if loads:
        shares = [[n * len(row) / max(sum(row), 1) for n in row] for row in loads]
        image = places[1, 1].imshow(shares, aspect="auto", cmap="PuOr_r", vmin=0, vmax=2, interpolation="nearest")
        places[1, 1].set(xlabel="expert", ylabel="MoE layer", title="load / mean, last entry")
        places[1, 1].xaxis.set_major_locator(MaxNLocator(integer=True))
        places[1, 1].yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=places[1, 1])
    else:
        _lines(places[1, 1], log, {"depth_query_norm": "longest query over depth"})
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(unfinished, format="png")
    unfinished.replace(path)


def _lines(axes: Axes, log: Sequence[dict[str, Any]], names: dict[str, str]) -> None:
    for (name, label), color in zip(names.items(), (_FIRST, _SECOND), strict=False):
        points = [(entry.get("step", index), entry[name]) for index, entry in enumerate(log) if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.6, label=label)
    axes.set_xlabel("step")
    axes.grid(color=_GRID)
    if axes.lines:
        axes.legend(frameon=False)
