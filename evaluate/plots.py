"""Plots of an evaluation: tasks side by side, and quality along training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from .papers import Paper
from .results import Results, TaskResult

_COLOURS = ("#4c566a", "#2e86ab", "#e07a5f", "#81b29a", "#b56576", "#f2cc8f", "#6d597a", "#355070")
_PAPER = "#d0d0d0"


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the plots that these results allow, as PNG files into `folder`."""
    drawn = []
    shares = [task for task in results.tasks if task.is_share]
    if shares:
        drawn.append(_save(_tasks(results, shares), folder / "tasks.png"))
    if _shows_recovery(results):
        drawn.append(_save(_recovery(results), folder / "recovery.png"))
    return drawn


def _tasks(results: Results, tasks: list[TaskResult]) -> Figure:
    """Bars with one standard error; the paper's published values as grey ticks behind."""
    names = [model.name for model in results.models]
    figure = Figure(figsize=(max(7.0, len(tasks) * (0.5 + 0.25 * len(names))), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [index + (number - (len(names) - 1) / 2) * width for index in range(len(tasks))]
        values = [100 * task.scores[name].value for task in tasks]
        errors = [100 * (task.scores[name].standard_error or 0) for task in tasks]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.bar(places, values, width, yerr=errors, capsize=2, label=name, color=colour, error_kw={"lw": 0.8})
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
    return any(names <= found.keys() for found in results.divergences.values())


def _recovery(results: Results) -> Figure:
    """What the models along one training keep of the original: the average, or the divergence without tasks."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    points = _along_training(results)
    steps = [step for step, _ in points]
    original = results.original.name
    if results.average:
        values = results.average.values
        kept = [100 * values[name] / values[original] for _, name in points]
        axes.plot(steps, kept, "o-", color=_COLOURS[1])
        axes.axhline(100, color=_COLOURS[0], lw=1, ls="--")
        axes.set_ylabel(f"per cent of {original}'s average kept")
    else:
        for text, found in results.divergences.items():
            if found:
                axes.plot(steps, [found[name].kl for _, name in points], "o-", label=text)
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
