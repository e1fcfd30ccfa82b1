"""The loss curve as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from modeling_k3.training.plot import running_mean

_INK, _QUIET, _GRID = "#22262e", "#7d8590", "#e9ebee"
_TRAIN, _HELD_OUT, _REFERENCE = "#a9c1de", "#1f5fa8", "#c4622d"
_LETTERS = 9
# From the end of a line to the left edge of its name.
_LEADER = {"arrowstyle": "-", "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0}

Point = Sequence[float]


def draw_curve(
    path: Path,
    train: Sequence[Point],
    held_out: Sequence[Point],
    references: dict[str, float],
    *,
    final: float,
    title: str,
    note: str,
    by_step: bool,
) -> None:
    """Bits per byte over the training, with what compressors need for the same held-out text as level lines.

    Args:
        path: PNG to write.
        train: (seconds, step, bits) of every step.
        held_out: (seconds, step, bits) of every look at the held-out sample, the first one before training.
        references: level by name.
        final: the trained model on all held-out text.
        title, note: the heading and the quiet line below it.
        by_step: whether the axis counts steps, as suits a budget of steps, or seconds.
    """
    figure = Figure(figsize=(8, 4.8), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    column = 1 if by_step else 0
    last = max(point[column] for point in held_out)
    at, bits = [point[column] for point in train], [point[2] for point in train]
    axes.plot(at, bits, color=_TRAIN, linewidth=0.6, alpha=0.45)
    axes.plot(at, running_mean(bits, 0.9), color=_TRAIN, linewidth=1.8)
    axes.plot(
        [point[column] for point in held_out],
        [point[2] for point in held_out],
        color=_HELD_OUT,
        linewidth=2,
        marker="o",
        markersize=4,
        markeredgecolor="white",
        markeredgewidth=0.7,
        clip_on=False,
        zorder=3,
    )
    axes.plot([last], [final], color=_HELD_OUT, marker="D", markersize=7, clip_on=False, zorder=4)
    for level in references.values():
        axes.axhline(level, color=_REFERENCE, linewidth=1, linestyle=(0, (5, 4)))
    labels = [
        (final, "all held-out text", _HELD_OUT, "bold"),
        (held_out[-1][2], "held-out, short pieces", _HELD_OUT, "normal"),
    ]
    if bits:
        labels.append((running_mean(bits, 0.9)[-1], "training", "#6f93bd", "normal"))
    labels += [(level, name, _REFERENCE, "normal") for name, level in references.items()]
    axes.set_xlabel("step" if by_step else "seconds of training", color=_QUIET, fontsize=9)
    _dress(axes, last, [point[2] for point in held_out] + list(references.values()) + bits + [final])
    _label_ends(axes, last, labels)
    axes.set_title(title, loc="left", color=_INK, fontsize=13, fontweight="bold", pad=26)
    axes.annotate(
        note, (0, 1), xycoords="axes fraction", xytext=(0, 10), textcoords="offset points", color=_QUIET, fontsize=9
    )
    figure.savefig(path)


def _label_ends(axes: Axes, last: float, labels: Sequence[tuple[float, str, str, str]]) -> None:
    """Names and values at the lines' right ends instead of a legend, moved apart where they would overlap.

    Args:
        labels: (level, name, color, font weight).
    """
    labels = sorted(labels)
    bottom, top = axes.get_ylim()
    # The axes take about three quarters of the figure's height; the scale is logarithmic.
    line = math.log(top / bottom) * _LETTERS * 1.5 / (0.75 * 72 * axes.figure.get_figheight())
    heights = spread([math.log(level) for level, *_ in labels], line)
    for (level, name, color, weight), height in zip(labels, heights, strict=True):
        axes.annotate(
            f"{name}  {level:.2f}",
            (last, level),
            xytext=(1.03, (height - math.log(bottom)) / math.log(top / bottom)),
            textcoords="axes fraction",
            va="center",
            color=color,
            fontsize=_LETTERS,
            fontweight=weight,
            annotation_clip=False,
            arrowprops=_LEADER | {"color": color},
        )


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """Move rising heights as little as possible, in the sum of squares, so that neighbours are `apart` at least."""
    # Without the distances kept between them heights must only not fall: whatever does is averaged.
    groups: list[tuple[float, int]] = []
    for index, height in enumerate(heights):
        mean, count = height - index * apart, 1
        while groups and groups[-1][0] > mean:
            before, size = groups.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        groups.append((mean, count))
    level = [mean for mean, count in groups for _ in range(count)]
    return [mean + index * apart for index, mean in enumerate(level)]


def _dress(axes: Axes, last: float, values: Sequence[float]) -> None:
    axes.set_yscale("log")
    axes.set_ylim(min(values) * 0.93, max(values) * 1.05)
    axes.yaxis.set_major_locator(FixedLocator([1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(0, last)
    axes.set_ylabel("bits per byte", color=_QUIET, fontsize=9)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
