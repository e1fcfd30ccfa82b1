"""The loss curve names its lines where they end, and no name covers another."""

import itertools
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from modeling_k3.demo import chart


def test_spread_moves_only_what_is_too_close_and_as_little_as_possible() -> None:
    assert chart.spread([1.0, 3.0, 7.0], 1.0) == [1.0, 3.0, 7.0]
    assert chart.spread([2.0, 2.0], 1.0) == [1.5, 2.5]
    # The pair makes room, and then the third is in its way.
    assert chart.spread([2.0, 2.0, 2.5, 9.0], 1.0) == pytest.approx([7 / 6, 13 / 6, 19 / 6, 9.0])
    assert chart.spread([], 1.0) == []


@pytest.mark.parametrize("final", [1.74, 1.0, 1.9])
def test_names_at_the_ends_do_not_overlap(final: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Figure] = []
    monkeypatch.setattr(chart, "Figure", lambda *args, **kwargs: made.append(Figure(*args, **kwargs)) or made[-1])
    train = [[float(step), step, 9 - 7.25 * step / 100] for step in range(1, 101)]
    chart.draw_curve(
        tmp_path / "loss.png", train, [[0.0, 0, 9.0], [100.0, 100, 1.85]], {"gzip -9": 1.93, "lzma": 1.9},
        final=final, title="title", note="note", by_step=True,
    )  # fmt: skip
    renderer = FigureCanvasAgg(made[0]).get_renderer()
    named = [text for text in made[0].findobj(Annotation) if text.get_text() != "note"]
    assert len(named) == 5
    # Of the letters alone: the box of an annotation has its line in it.
    boxes = sorted((Text.get_window_extent(text, renderer) for text in named), key=lambda box: box.y0)
    assert all(above.y0 >= below.y1 for below, above in itertools.pairwise(boxes))
    # All inside the picture.
    assert all(made[0].bbox.x0 <= box.x0 and box.x1 <= made[0].bbox.x1 and box.y0 >= 0 for box in boxes)
