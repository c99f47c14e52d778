"""Plots: which are drawn, and what the difference to the original of many models looks like."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from rewired.evaluate import plots
from rewired.evaluate.report import markdown, write_report
from rewired.evaluate.results import ModelInfo, Results

from .made_up_results import (
    COMMAND,
    DATE,
    DIVERGENCE,
    MMLU,
    drawn,
    many,
    renamed,
    results,
    shares,
)


def test_plots_stand_in_the_report(tmp_path: Path) -> None:
    write_report(results(**shares("MMLU", "PIQA")), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["recovery.png", "tasks.png"]
    text = (tmp_path / "report.md").read_text()
    assert re.findall(r"!\[.*\]\((.*)\)", text) == ["tasks.png", "recovery.png"]
    assert text == markdown(results(**shares("MMLU", "PIQA")), COMMAND, DATE, ["tasks.png", "recovery.png"])
    assert "## Tasks" in text[: text.index("![tasks]")] and "## Divergence" not in text[: text.index("![tasks]")]
    page = (tmp_path / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2 and ".png" not in page


def test_a_divergence_alone_is_drawn_along_training(tmp_path: Path) -> None:
    write_report(results(tasks=[]), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["recovery.png"]


def models(*others: tuple[str, int | None]) -> list[ModelInfo]:
    """The original, and hybrid and tuned with these roles and steps."""
    infos = [
        ModelInfo(name, role, "1" * 64, step) for name, (role, step) in zip(("hybrid", "tuned"), others, strict=True)
    ]
    return [ModelInfo("dense", "original", "0" * 64), *infos]


@pytest.mark.parametrize(
    "among",
    [
        models(("rewired", None), ("rewired", None)),
        models(("rewired", None), ("rewired", 300)),
        models(("rewired", 100), ("control", 100)),
    ],
    ids=["no step", "one step", "one step and the control's, which is another training"],
)
def test_recovery_is_drawn_where_two_models_of_a_training_are_compared(among: list[ModelInfo], tmp_path: Path) -> None:
    write_report(results(**shares("MMLU", "PIQA"), models=among), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["tasks.png"]


@pytest.mark.parametrize(
    "divergences",
    [{}, {"prose.txt": {}}, {"prose.txt": {"tuned": DIVERGENCE}}],
    ids=["no text", "an original from earlier results", "a model from earlier results"],
)
def test_recovery_is_not_drawn_where_there_is_nothing_to_draw(divergences: dict[str, Any], tmp_path: Path) -> None:
    """One task has no average, and earlier results have no weights to measure a divergence with."""
    write_report(results(tasks=[MMLU], divergences=divergences), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["tasks.png"]


def test_a_name_that_looks_like_a_formula_is_drawn(tmp_path: Path) -> None:
    write_report(renamed("$\\frac$"), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["recovery.png", "tasks.png"]


# more than six models


def figure_of(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The plot of the tasks."""
    saved: dict[str, Figure] = {}
    monkeypatch.setattr(plots, "_save", lambda figure, path: saved.update({path.name: figure}) or path)
    plots.draw(results, tmp_path)
    return saved["tasks.png"]


@pytest.mark.parametrize(("models", "are_bars"), [(6, True), (7, False)])
def test_up_to_six_models_are_bars(
    models: int, are_bars: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = figure_of(many(models, "MMLU", "PIQA"), tmp_path, monkeypatch)
    assert (len(figure.axes) == 1 and bool(figure.axes[0].containers)) == are_bars


def test_many_models_are_rows_of_paired_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel a task and one for the average; 95 % of each difference around it, in percentage points."""
    results = many(9, "MMLU", "PIQA")
    figure = figure_of(results, tmp_path, monkeypatch)
    assert [axes.get_title().split("\n") for axes in figure.axes] == [
        ["MMLU", "1,500 items"],
        ["PIQA", "1,500 items"],
        ["average", "of 2 tasks"],
    ]
    names = [model.name for model in results.others]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == names
    assert figure.axes[0].yaxis_inverted(), "the first model is on top"
    assert "difference to dense" in figure.get_supxlabel()
    for axes, task in zip(figure.axes, results.tasks, strict=False):
        zero, *_ = axes.get_lines()
        assert list(zero.get_xdata()) == [0, 0]
        for row, (name, drawing) in enumerate(zip(names, axes.containers, strict=True)):
            point, _, (bar,) = drawing.lines
            ((start, at), (stop, _)) = bar.get_segments()[0]
            delta = task.deltas[name]
            assert (point.get_xdata()[0], point.get_ydata()[0], at) == (pytest.approx(100 * delta.value), row, row)
            assert stop - start == pytest.approx(2 * 100 * 1.96 * delta.standard_error)


def test_a_model_has_one_colour_in_all_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original's is that of the zero line alone."""
    figure = figure_of(many(30, "MMLU", "PIQA"), tmp_path, monkeypatch)
    colours = [[drawing.lines[0].get_color() for drawing in axes.containers] for axes in figure.axes]
    assert colours[0] == colours[1] == colours[2]
    assert all(axes.get_lines()[0].get_color() not in colours[0] for axes in figure.axes)


@pytest.mark.parametrize("tasks", [1, 4, 7])
def test_no_label_covers_another(tasks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor leaves the figure, whatever the names are."""
    titles = [f"a_benchmark_with_a_long_name_{number}" for number in range(tasks)]
    figure = figure_of(many(24, *titles, name="ladder-0-30-refit-distillation/checkpoint"), tmp_path, monkeypatch)
    figure.draw_without_rendering()
    panels = [axes.get_tightbbox() for axes in figure.axes]
    texts = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    texts += [axes.title.get_window_extent() for axes in figure.axes]
    texts += [text.get_window_extent() for text in figure.texts]
    assert not any(one.overlaps(other) for number, one in enumerate(texts) for other in texts[:number])
    assert not any(one.overlaps(other) for number, one in enumerate(panels) for other in panels[:number])
    assert all(figure.bbox.contains(*corner) for text in texts for corner in text.corners())


def test_a_difference_of_one_item_has_no_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(many(8, "MMLU", error=None), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["tasks.png"]
