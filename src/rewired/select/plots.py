"""The plot of scores: what each layer costs, and which layers were chosen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rewired.model.presets import STANDARD

from .choice import Choice
from .scores import LayerScore

_COLOURS = ("#2e86ab", "#e07a5f", "#81b29a", "#b56576", "#6d597a")


def draw(scores: Mapping[str, Mapping[int, LayerScore]], choice: Choice, path: Path) -> None:
    """Bars of each layer's KL alone, by wiring; those that were chosen are filled."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(max(7.0, 0.28 * len(choice)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(scores)
    for number, (name, layers) in enumerate(scores.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [layer + (number - (len(scores) - 1) / 2) * width for layer in range(len(choice))]
        fills = [colour if own == name else "none" for own in choice]
        heights = [layers[layer].single for layer in range(len(choice))]
        axes.bar(places, heights, 0.9 * width, color=fills, edgecolor=colour, lw=0.8)
        axes.bar(0, 0, color=colour, label=name)
    if any(score.single > 0 for layers in scores.values() for score in layers.values()):
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"layer; filled: the {len(choice) - choice.count(STANDARD)} that were chosen")
    axes.set_ylabel("KL(original || only this layer rewired), refitted")
    axes.legend(fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": ""})
