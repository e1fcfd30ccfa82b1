"""Memory tables for people: lines of text, JSON, and stacked bars."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modeling_k3.planning.expected import Expected
from modeling_k3.planning.plan import MemoryPlan
from modeling_k3.planning.scenarios import Scenario
from modeling_k3.planning.sizes import format_bytes

_COLOURS = ("#1f5fa8", "#6f93bd", "#a9c1de", "#c4622d", "#e0a27f", "#5b8c5a", "#a7c4a0", "#8a6fa8", "#c5b3d6",
            "#7d8590", "#b8bdc4", "#d9b44a", "#4a9aa8", "#a8d0d6")  # fmt: skip


def table_lines(table: Mapping[str, Mapping[str, int]], budget: int | None = None) -> list[str]:
    """One line for each item that takes something, sums of groups and of everything."""
    whole = sum(sum(group.values()) for group in table.values())
    lines = []
    for title, group in table.items():
        lines.append(f"{title:32}{format_bytes(sum(group.values())):>12}")
        lines += [f"  {name:30}{format_bytes(size):>12}  {size / whole:6.1%}" for name, size in group.items() if size]
    lines.append(f"{'total':32}{format_bytes(whole):>12}")
    if budget is not None:
        lines[-1] += f"  of {format_bytes(budget)}"
    return lines


def plan_lines(plan: MemoryPlan, expected: Expected | None = None) -> list[str]:
    """The plan's choices, how long they should take if that is known, then its table."""
    use = plan.use
    forms = {"full": use.dtype}
    dense = (
        f"{forms.get(use.dense, use.dense)}, {'in memory' if plan.dense_place == 'memory' else 'read from the files'}"
    )
    lines = [
        f"{plan.name}: {use.context} tokens of context, batch {use.batch}, in {format_bytes(plan.budget)}",
        f"  dense part       {dense}",
    ]
    if plan.expert_total:
        held = f"{format_bytes(plan.expert_bytes)} of {format_bytes(plan.expert_total)} resident"
        lines.append(f"  routed experts   {forms.get(use.experts, use.experts)}, {held}")
        if plan.latent_per_token:
            full = format_bytes(plan.expert_bytes_at(0))
            lines.append(
                f"                   {full} with an empty context, {plan.latent_per_token} B less for each token"
            )
    lines.append(f"  prefill chunk    {min(use.prefill_chunk, use.context)} tokens")
    lines.append(f"  rollback window  {use.rollback_tokens} tokens")
    lines.append(f"  prefix cache     {use.prefix_tokens} tokens, {format_bytes(plan.table['state']['prefix cache'])}")
    lines += expected.lines() if expected else ["  expected         seconds: --measure DIR measures disk and memory"]
    return [*lines, "", *table_lines(plan.table, plan.budget), *(f"note: {note}" for note in plan.notes)]


def scenario_lines(found: list[Scenario]) -> list[str]:
    """Machine by machine."""
    lines = []
    for scenario in found:
        lines += [scenario.title, f"  {scenario.verdict}"]
        for name, (size, items) in scenario.memories.items():
            lines.append(f"  {name}: {format_bytes(sum(items.values()))} of {format_bytes(size)}")
            lines += [f"    {item:28}{format_bytes(count):>12}" for item, count in items.items() if count]
        lines.append("")
    return lines


def write_json(content: Any, path: Path) -> None:
    """Write for a machine to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def draw(bars: Mapping[str, tuple[int | None, Mapping[str, int]]], path: Path, title: str) -> None:
    """Draw one stacked bar for each memory: in GiB with a mark where it ends, or several as shares of what there is.

    Args:
        bars: name -> (bytes there are or None, bytes by item).
        path: PNG to write.
        title: the heading.
    """
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    as_shares = len(bars) > 1 and all(size for size, _ in bars.values())
    units = [size / 100 if as_shares and size else 2**30 for size, _ in bars.values()]
    figure = Figure(figsize=(10, 2.2 + 0.9 * len(bars)), dpi=140, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(item for _, items in bars.values() for item, count in items.items() if count))
    starts = [0.0] * len(bars)
    for number, item in enumerate(names):
        widths = [items.get(item, 0) / unit for (_, items), unit in zip(bars.values(), units, strict=True)]
        colour, hatch = _COLOURS[number % len(_COLOURS)], "//" if number >= len(_COLOURS) else None
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3, "label": item}
        axes.barh(range(len(bars)), widths, left=starts, **style)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, ((size, items), unit) in enumerate(zip(bars.values(), units, strict=True)):
        end = max(starts[row], size / unit if size else 0)
        if size is not None:
            axes.plot([size / unit] * 2, [row - 0.45, row + 0.45], color="#22262e", linewidth=2)
        axes.annotate(format_bytes(sum(items.values())), (end, row), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlabel("% of the memory there is" if as_shares else "GiB")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=7.5, frameon=False, ncols=5, loc="outside lower center")
    figure.savefig(path)
