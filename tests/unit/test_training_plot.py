"""The picture of a training: every kind of log gives one, and what it shows is what the log says."""

import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from modeling_k3.training import plot
from modeling_k3.training.plot import draw_training


def figure_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: Any) -> Figure:
    """Draw, and keep the figure."""
    made: list[Figure] = []
    monkeypatch.setattr(plot, "Figure", lambda *args, **kwargs: made.append(Figure(*args, **kwargs)) or made[-1])
    draw_training(tmp_path / "new" / "a.png", *arguments)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.png"]
    return made[0]


def entry(step: int) -> dict[str, Any]:
    return {
        "step": step, "loss": 6.0 / step, "grad_norm": 1.0, "learning_rate": 1e-3, "router_max_violation": 0.5,
        "router_mean_violation": 0.25, "router_dropped": 0.0, "depth_entropy": 0.9, "depth_largest_weight": 0.6,
    }  # fmt: skip


def test_lines_are_the_logs_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = [entry(step) for step in range(1, 6)]
    log.insert(3, {"step": 3, "eval_loss": 2.5})
    log[1]["grad_norm"] = math.nan
    figure = figure_of(monkeypatch, tmp_path, log, {"model.layers.1.block_sparse_moe.gate": [4, 0]}, {})
    lines = {line.get_label(): line.get_xydata().tolist() for axes in figure.axes for line in axes.lines}
    assert lines["training"] == [[step, 6.0 / step] for step in range(1, 6)]
    assert lines["evaluation"] == [[3, 2.5]]
    assert lines["worst layer, max / mean"] == [[step, 1.5] for step in range(1, 6)]
    assert lines["mean of the layers"] == [[step, 1.25] for step in range(1, 6)]
    assert [x for x, _ in lines["norm of the gradient"]] == [1, 3, 4, 5]
    assert "step 5, loss 1.200" in figure.get_suptitle()
    images = [axes.images[0] for axes in figure.axes if axes.images]
    assert images[0].get_array().tolist() == [[2.0, 0.0]]


def test_depth_has_blocks_at_the_left_and_the_running_sum_at_the_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    depth = {
        "model.layers.0.mlp_res_proj": [0.25, 0.75],
        "model.layers.2.self_attention_res_proj": [0.5, 0.125, 0.375],
        "model.output_attn_res_proj": [0.25, 0.25, 0.5],
    }
    figure = figure_of(monkeypatch, tmp_path, [entry(1)], {}, depth)
    axes = next(axes for axes in figure.axes if axes.images)
    rows = axes.images[0].get_array().filled(-1).tolist()
    assert rows == [[0.25, -1, 0.75], [0.5, 0.125, 0.375], [0.25, 0.25, 0.5]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0 mlp", "2 attention", "output"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["block 1", "block 2", "sum"]


def test_dropped_places_have_a_line_where_there_are_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = [{**entry(step), "router_dropped": 0.1} for step in (1, 2)]
    counts = [len(figure_of(monkeypatch, tmp_path, each, {}, {}).axes) for each in ([entry(1), entry(2)], log)]
    assert counts[1] == counts[0] + 1


@pytest.mark.parametrize("log", [[], [{"step": 1, "loss": 2.0}], [{"eval_loss": 1.0}]], ids=["empty", "loss", "eval"])
def test_a_model_without_experts_and_depth_has_a_picture_too(log: list[dict[str, Any]], tmp_path: Path) -> None:
    draw_training(tmp_path / "a.png", log, {}, {}, title="dense")
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"


def test_a_deep_model_stays_readable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    depth = {f"model.layers.{layer}.mlp_res_proj": [1 / 9] * 9 for layer in range(93)}
    loads = {f"model.layers.{layer}.block_sparse_moe.gate": [1] * 896 for layer in range(92)}
    figure = figure_of(monkeypatch, tmp_path, [entry(1)], loads, depth)
    for axes in (axes for axes in figure.axes if axes.images):
        assert len(axes.get_yticks()) <= 24 and len(axes.texts) == 0
