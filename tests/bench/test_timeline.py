"""Timelines of traces by hand: the layers that are chosen, and what stands above what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from rewired.bench import timeline
from rewired.bench.trace import ATTENTION, MLP, RankTrace, Span, TracedAllReduce


def rank(layer_times: list[float], overlaps: bool) -> RankTrace:
    """Layers of an attention and an MLP, each half of the layer's time; an all-reduce takes a fifth of it, of which
    a half is in gloo's queue. What does not overlap is waited for."""
    modules, all_reduces, waits, start = [], [], [], 1000.0
    for time in layer_times:
        for name in (ATTENTION, MLP):
            end = start + time * (0.5 if overlaps else 0.3)
            modules.append(Span(name, start, end))
            all_reduces.append(TracedAllReduce(end, end + 0.1 * time, end + 0.2 * time, name))
            start = end
            if not overlaps:
                start = end + 0.2 * time
                waits.append(Span("wait", end, start))
    products = [Span("aten::mm", module.start, module.start + 0.5 * (module.end - module.start)) for module in modules]
    return RankTrace(modules, products, all_reduces, waits)


def bars(axes: Any, label: str) -> list[tuple[float, float]]:
    """Left and right edges of what is drawn under this label."""
    (drawn,) = [each for each in axes.collections if each.get_label() == label]
    edges = [path.vertices[:, 0] for path in drawn.get_paths()]
    return [(round(x.min(), 6), round(x.max(), 6)) for x in edges]


def test_the_layers_are_the_pair_of_median_time_that_is_inside_the_model() -> None:
    times = [9000.0, 1000.0, 2000.0, 4000.0, 1000.0, 9000.0]  # inner pairs: 3, 6 and 5 ms, the last from 13 to 18
    assert timeline.window(rank(times, overlaps=True)) == (13000, 18000)


def test_without_marked_modules_every_second_all_reduce_begins_a_layer() -> None:
    whole = rank([1000.0] * 6, overlaps=True)
    unmarked = RankTrace([], whole.products, whole.all_reduces, [])
    start, end = timeline.window(unmarked)
    assert end - start == pytest.approx(2000)
    assert start in [each.launched for each in whole.all_reduces[::2]]


def test_a_short_model_is_drawn_whole() -> None:
    assert timeline.window(rank([1000.0], overlaps=True)) == (1000, 2000)


def test_wirings_stand_above_each_other_on_one_axis_of_time() -> None:
    slow, fast = rank([2000.0] * 6, overlaps=False), rank([1000.0] * 6, overlaps=True)
    figure = timeline.timeline({"standard": slow, "ladder": fast}, "a model")
    assert [axes.get_title("left") for axes in figure.axes] == ["standard", "ladder"]
    assert [axes.get_xlim() for axes in figure.axes] == [(0, 4)] * 2  # milliseconds


def test_an_all_reduce_lies_under_a_wait_or_under_the_next_module() -> None:
    slow, fast = rank([2000.0] * 6, overlaps=False), rank([1000.0] * 6, overlaps=True)
    standard, ladder = timeline.timeline({"standard": slow, "ladder": fast}, "a model").axes
    assert bars(standard, "attention") == [(0, 0.6), (2, 2.6)]
    assert bars(standard, "products of attention") == [(0, 0.3), (2, 2.3)]
    assert bars(standard, "launched by attention") == [(0.6, 0.8), (2.6, 2.8)]
    assert bars(standard, "all-reduce of attention") == [(0.8, 1), (2.8, 3)]
    assert bars(standard, "waits") == [(0.6, 1), (1.6, 2), (2.6, 3), (3.6, 4)]
    assert bars(ladder, "MLP") == [(0.5, 1), (1.5, 2)]
    assert bars(ladder, "launched by attention") == [(0.5, 0.6), (1.5, 1.6)]
    assert bars(ladder, "all-reduce of attention") == [(0.6, 0.7), (1.6, 1.7)]
    assert bars(ladder, "waits") == []


def test_what_begins_before_the_layers_is_cut_at_their_beginning() -> None:
    ladder = timeline.timeline({"ladder": rank([1000.0] * 6, overlaps=True)}, "a model").axes[0]
    assert bars(ladder, "launched by MLP") == [(0, 0.1), (1, 1.1)]  # the MLP before was the last to launch


def test_a_file_is_written(tmp_path: Path) -> None:
    figure = timeline.timeline({"ladder": rank([1000.0] * 6, overlaps=True)}, "a model")
    figure.savefig(tmp_path / "timeline.png")
    assert matplotlib.image.imread(tmp_path / "timeline.png").std() > 0
