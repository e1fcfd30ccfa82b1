"""A precision report as table, JSON and picture."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from modeling_k3.readiness.precision import GroupReport, PrecisionReport

_FREE, _FORCED, _BOUND = "#1f5fa8", "#c4622d", "#7d8590"


def as_table(report: PrecisionReport) -> Table:
    """A column for the short and one for the long inputs."""
    table = Table("", *(f"{group.samples} {group.group}" for group in report.groups))
    table.title = f"exact against {report.fast}, {report.dtype}"
    rows: list[tuple[str, Callable[[GroupReport], str]]] = [
        ("tokens", lambda group: f"{group.tokens:,}"),
        ("KL in nats, mean (largest)", lambda group: f"{group.kl:.1e} ({group.kl_max:.1e})"),
        ("  with forced routes", lambda group: f"{group.forced_kl:.1e} ({group.forced_kl_max:.1e})"),
        ("same likeliest token", lambda group: f"{group.top1:.2%}"),
        ("  with forced routes", lambda group: f"{group.forced_top1:.2%}"),
        ("perplexity, exact", lambda group: f"{group.perplexity_exact:.4g}"),
        ("  change by the fast path", lambda group: f"{group.perplexity_fast / group.perplexity_exact - 1:+.1e}"),
        ("routes changed", lambda group: f"{group.route_changes:.2%}"),
    ]
    for name, value in rows:
        table.add_row(name, *map(value, report.groups))
    return table


def as_sentence(report: PrecisionReport) -> str:
    """The outcome in a line."""
    worst = max(group.forced_kl for group in report.groups)
    origin = f"{len(report.noise)} noise runs" if report.noise else "default or given"
    verdict = "within" if report.passed else "ABOVE"
    return f"{verdict} the threshold: mean KL with forced routes {worst:.1e}, allowed {report.threshold:.1e} ({origin})"


def write_json(report: PrecisionReport, path: Path) -> None:
    """Write everything for a machine to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"passed": report.passed, **asdict(report)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def draw(report: PrecisionReport, path: Path) -> None:
    """Draw KL over the position for each group, and the error of each KDA layer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(11, 4.2), dpi=140, facecolor="white", layout="constrained")
    over_position, over_layers = figure.subplots(1, 2)
    # A difference of exactly 0 has no place on a logarithmic axis.
    floor = 1e-18
    for group, style in zip(report.groups, ("-", "--"), strict=False):
        positions = [row[0] for row in group.drift]
        # The wide line shows below the narrow one where both are equal.
        for column, name, colour, width in ((1, "as it runs", _FREE, 4.0), (2, "routes forced", _FORCED, 1.3)):
            values, label = [max(row[column], floor) for row in group.drift], f"{group.group}, {name}"
            over_position.plot(positions, values, style, color=colour, linewidth=width, label=label)
    over_position.axhline(report.threshold, color=_BOUND, linestyle=":", label="threshold of the mean")
    over_position.set(xscale="log", yscale="log", xlabel="position", ylabel="KL(exact || fast), nats")
    over_position.set_title("Drift over the position", loc="left")
    over_position.legend(fontsize=8, frameon=False)
    numbers = sorted(report.layers)
    errors = [max(report.layers[n], floor) for n in numbers]
    over_layers.plot(range(len(numbers)), errors, "o", color=_FREE)
    over_layers.set(yscale="log", xlabel="KDA layer", ylabel="relative error of its output")
    over_layers.set_title("Each layer alone, on the exact run's inputs", loc="left")
    shown = range(0, len(numbers), max(1, len(numbers) // 16))
    over_layers.set_xticks(list(shown), [str(numbers[i]) for i in shown])
    if errors:
        # A decade around, so that a difference of a third does not look like one of a thousand.
        over_layers.set_ylim(min(errors) / 10, max(errors) * 10)
    for axes in (over_position, over_layers):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(f"KDA: exact against {report.fast}, {report.dtype}")
    figure.savefig(path)
