"""How wirings look in the plot of a bench: a colour and a marker each, and names at the ends of their lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .contenders import NONE, STANDARD, STOCK

# Okabe and Ito's, which colour-blind readers can tell apart
_COLOURS = {
    STANDARD: "#000000",
    STOCK: "#7f7f7f",
    NONE: "#7f7f7f",
    "ladder": "#0072b2",
    "ladder+peek": "#56b4e9",
    "parallel": "#009e73",
    "desync-2x": "#e69f00",
    "desync-4x": "#d55e00",
    "partial-0.5": "#cc79a7",
}
_MORE = ("#882255", "#332288", "#999933", "#44aa99", "#117733", "#661100")  # Tol's, for wirings of other names
_MARKERS = "os^Dvp<>hX"
_LINES = {STANDARD: "-", STOCK: ":", NONE: "--"}
_NAMES = {NONE: "no communication", STOCK: "stock"}
_GID = "wiring"  # of lines that have one's name at their end
_LINE_HEIGHT = 0.125  # inches of a name, with what keeps it from the next


class Styles:
    """The look of each wiring, the same in all panels."""

    def __init__(self, wirings: Iterable[str]) -> None:
        names = list(wirings)
        others = [name for name in names if name not in _COLOURS]
        self._colours = _COLOURS | {name: _MORE[number % len(_MORE)] for number, name in enumerate(others)}
        rewired = [name for name in names if name not in _LINES]
        self._markers = {name: _MARKERS[number % len(_MARKERS)] for number, name in enumerate(rewired)}

    def colour(self, wiring: str) -> str:
        return self._colours[wiring]

    def line(self, wiring: str) -> dict[str, Any]:
        """For matplotlib's `plot`. Baselines and the bound are told apart by their dashes, wirings by their markers."""
        look = {"ls": _LINES[wiring], "marker": "."} if wiring in _LINES else {"marker": self._markers[wiring]}
        return {"color": self.colour(wiring), "lw": 1.3, "ms": 4, "gid": _GID, **look}

    def bar(self, wiring: str) -> dict[str, Any]:
        """For matplotlib's `barh`."""
        hollow = {"fill": False, "ls": "--"} if wiring == NONE else {"color": self.colour(wiring)}
        return {"edgecolor": self.colour(wiring), "height": 0.7, **hollow}


def name_of(wiring: str) -> str:
    """As a reader knows it who has not read this code."""
    return _NAMES.get(wiring, wiring)


def name_ends(figure: Figure, styles: Styles) -> None:
    """Write each line's name right of its axes, as near to its end as the other names let it."""
    figure.draw_without_rendering()  # what is near depends on where the axes are
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_gid() == _GID]
        ends = {str(line.get_label()): np.asarray(line.get_xydata())[-1] for line in lines}
        to_axes = axes.transData + axes.transAxes.inverted()
        heights = {name: float(to_axes.transform(end)[1]) for name, end in ends.items()}
        ordered = sorted(heights, key=heights.__getitem__)
        gap = _LINE_HEIGHT * figure.dpi / axes.bbox.height
        for name, place in zip(ordered, spread([heights[name] for name in ordered], gap), strict=True):
            _name_end(axes, name, ends[name], place, styles.colour(name))


def _name_end(axes: Any, name: str, end: Any, place: float, colour: str) -> None:
    axes.annotate(
        name_of(name),
        end,
        (1.05, place),
        textcoords="axes fraction",
        va="center",
        fontsize="x-small",
        color=colour,
        arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6, "relpos": (0, 0.5)},
        annotation_clip=False,
    )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """The places nearest to `places`, which rise, that are `gap` apart: least squares, by pooling neighbours."""
    pools: list[list[float]] = []
    for number, place in enumerate(places):
        pools.append([place - number * gap])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    pooled = [mean(pool) for pool in pools for _ in pool]
    return [place + number * gap for number, place in enumerate(pooled)]
