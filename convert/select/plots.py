"""A picture of scores: what each layer costs, and which were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .choice import STANDARD, Choice
from .scores import Scores

_COLOURS = ("#2e86ab", "#e07a5f", "#81b29a", "#b56576", "#6d597a")


def draw(scores: Scores, names: Sequence[str], choice: Choice, path: Path) -> None:
    """Bars of each layer's KL alone; those that were chosen are filled."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(max(7.0, 0.28 * len(choice)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        colour = _COLOURS[number % len(_COLOURS)]
        for layer, score in sorted(scores.found[name].items()):
            place = layer + (number - (len(names) - 1) / 2) * width
            is_chosen = choice[layer] == name
            axes.bar(place, score.single, 0.9 * width, color=colour if is_chosen else "none", edgecolor=colour, lw=0.8)
        axes.bar(0, 0, color=colour, label=name)
    count = len(choice) - choice.count(STANDARD)
    axes.set_yscale("log")
    axes.set_xlabel(f"layer; filled: the {count} that were chosen")
    axes.set_ylabel("KL(original || only this layer rewired), refitted")
    axes.legend(fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": ""})
