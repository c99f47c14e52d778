"""Plots of an evaluation: the models on each task, and quality along training."""

from __future__ import annotations

from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from rewired.quantities import count

from .papers import Paper
from .results import Results, TaskResult

_COLOURS = ("#4c566a", "#2e86ab", "#e07a5f", "#81b29a", "#b56576", "#f2cc8f", "#6d597a", "#355070")
_PAPER = "#d0d0d0"
_MOST_MODELS_IN_BARS = 6  # with more, nobody can read them
_PANELS_IN_A_ROW = 5
_INTERVAL = 1.96  # standard errors to each side: 95 %


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the plots that these results allow, as PNG files into `folder`."""
    drawn = []
    shares = [task for task in results.tasks if task.is_share]
    if shares:
        draw_tasks = _bars if len(results.models) <= _MOST_MODELS_IN_BARS else _differences
        drawn.append(_save(draw_tasks(results, shares), folder / "tasks.png"))
    if _shows_recovery(results):
        drawn.append(_save(_recovery(results), folder / "recovery.png"))
    return drawn


def _bars(results: Results, tasks: list[TaskResult]) -> Figure:
    """Each model's value with one standard error, grouped by task; the paper's published values as grey lines."""
    names = [model.name for model in results.models]
    figure = Figure(figsize=(max(7.0, len(tasks) * (0.5 + 0.25 * len(names))), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [index + (number - (len(names) - 1) / 2) * width for index in range(len(tasks))]
        values = [100 * task.scores[name].value for task in tasks]
        errors = [100 * (task.scores[name].standard_error or 0) for task in tasks]
        axes.bar(places, values, width, yerr=errors, capsize=2, label=name, color=_colour(number), error_kw={"lw": 0.8})
    if results.paper:
        _paper_lines(axes, results.paper, tasks)
    axes.set_xticks(range(len(tasks)), [task.title for task in tasks], rotation=25, ha="right")
    axes.set_ylabel("per cent, ± one standard error")
    axes.legend(fontsize="small", frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _paper_lines(axes: Any, paper: Paper, tasks: list[TaskResult]) -> None:
    for number, row in enumerate(paper.rows):
        places = [index for index, task in enumerate(tasks) if paper.value(row, task.title) is not None]
        values = [paper.value(row, tasks[index].title) for index in places]
        style = ("-", "--", ":", "-.")[number % 4]
        axes.hlines(
            values,
            [place - 0.45 for place in places],
            [place + 0.45 for place in places],
            colors=_PAPER if number % 2 else "#909090",
            linestyles=style,
            lw=1,
            label=f"paper: {row}",
        )


def _differences(results: Results, tasks: list[TaskResult]) -> Figure:
    """Each model's paired difference to the original with its 95 % interval: a panel a task, a row a model."""
    names = [model.name for model in results.others]
    panels = _panels(results, tasks)
    columns = min(len(panels), _PANELS_IN_A_ROW)
    rows = ceil(len(panels) / columns)
    panel_width = max(1.9, 0.09 * max(len(task.title) for task in tasks))  # inches, as all here
    width, height = 0.075 * max(map(len, names)) + panel_width * columns, rows * (0.8 + 0.22 * len(names)) + 0.5
    figure = Figure(figsize=(max(7.0, width), height), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip_longest(grid.flat, panels.items()):
        if panel is None:
            axes.remove()
        else:
            _draw_panel(axes, *panel)
    grid[0, 0].set_yticks(range(len(names)), names)
    grid[0, 0].set_ylim(len(names) - 0.5, -0.5)  # the first model on top
    label = f"paired difference to {results.original.name}\nin percentage points, with its 95 % interval"
    figure.supxlabel(label, fontsize="medium")
    return figure


def _panels(results: Results, tasks: list[TaskResult]) -> dict[str, list[tuple[float, float | None]]]:
    """Each panel's title, and every other model's difference with its standard error; the average comes last."""
    names = [model.name for model in results.others]
    panels = {
        f"{task.title}\n{count(task.scores[names[0]].n, 'item')}": [
            (task.deltas[name].value, task.deltas[name].standard_error) for name in names
        ]
        for task in tasks
    }
    if average := results.average:
        differences = [(average.deltas[name], average.delta_standard_errors[name]) for name in names]
        panels[f"average\nof {average.tasks} tasks"] = differences
    return panels


def _draw_panel(axes: Any, title: str, differences: list[tuple[float, float | None]]) -> None:
    axes.axvline(0, color=_COLOURS[0], lw=1)
    for row, (difference, error) in enumerate(differences):
        if row % 2:
            axes.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", lw=0, zorder=0)
        interval = 100 * _INTERVAL * (error or 0)
        axes.errorbar(100 * difference, row, xerr=interval, fmt="o", ms=4, lw=1.5, color=_colour(row + 1))
    axes.set_title(title, fontsize="medium")
    axes.tick_params(axis="y", length=0, labelsize="small")
    axes.tick_params(axis="x", labelbottom=True, labelsize="small")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(number: int) -> str:
    """Of the model `number`, in every plot; the original, 0, shares its colour with no other."""
    return _COLOURS[0] if number == 0 else _COLOURS[1 + (number - 1) % (len(_COLOURS) - 1)]


def _along_training(results: Results) -> list[tuple[int, str]]:
    return sorted(
        (model.step, model.name) for model in results.others if model.step is not None and model.role == "rewired"
    )


def _shows_recovery(results: Results) -> bool:
    names = {name for _, name in _along_training(results)}
    if len(names) < 2:
        return False
    if results.average:
        return results.average.values[results.original.name] > 0
    return any(names <= by_model.keys() for by_model in results.divergences.values())


def _recovery(results: Results) -> Figure:
    """The models along one training: the share of the original's average or, without tasks, the divergence from it."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    points = _along_training(results)
    steps = [step for step, _ in points]
    original = results.original.name
    if results.average:
        values = results.average.values
        shares = [100 * values[name] / values[original] for _, name in points]
        axes.plot(steps, shares, "o-", color=_COLOURS[1])
        axes.axhline(100, color=_COLOURS[0], lw=1, ls="--")
        axes.set_ylabel(f"average in per cent of {original}'s")
    else:
        for text, by_model in results.divergences.items():
            if by_model:
                axes.plot(steps, [by_model[name].kl for _, name in points], "o-", label=text)
        axes.set_ylabel(f"KL({original} || model), nats per token")
        axes.legend(frameon=False)
    axes.set_xlabel("training step")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name may hold a $
    figure.savefig(path, dpi=150)
    return path
