"""The wirings that layers are chosen among, and what a choice saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewired.model.layer_ranges import as_ranges
from rewired.model.wiring import Wiring

from .choice import STANDARD, Choice

# a layer of each of these stands for itself: it reduces all before the next one begins
WIRINGS: dict[str, dict[str, Any]] = {
    "ladder": {"preset": "ladder"},
    "ladder-peek": {"preset": "ladder", "peek": True},
    "parallel": {"preset": "parallel"},
    "parallel-overlap": {"preset": "parallel", "overlap": True},
    "desync-2x": {"preset": "desync", "every": 2},
}
# what may be asked for: one of them; what Sync-Point Drop (arXiv 2502.20727) does; the best of several for each layer
NAMES = {name: (name,) for name in WIRINGS} | {
    "spd": ("desync-2x",),
    "mix": ("ladder", "ladder-peek", "parallel", "desync-2x"),
}


def entries(choice: Choice) -> list[dict[str, Any]]:
    """The wiring that rewires what was chosen, in its JSON form; standard layers are left out."""
    regions = []
    for name in dict.fromkeys(choice):
        if name != STANDARD:
            modules = {2 * layer + half for layer, own in enumerate(choice) if own == name for half in (0, 1)}
            regions.append({"layers": ",".join(map(str, as_ranges(modules))), **WIRINGS[name]})
    return regions


def exposed(choice: Choice) -> int:
    """How many all-reduces a token waits for."""
    return Wiring.from_json(entries(choice), len(choice), hidden_size=1).exposed


def exposures(layers: int, names: Sequence[str]) -> list[dict[str, int]]:
    """How many all-reduces a token waits for more, for each layer and wiring, than in the dense model.

    An all-reduce is waited for by who reads next, so what layers save adds up.
    """
    dense = exposed((STANDARD,) * layers)
    return [
        {name: exposed(_only(layer, name, layers)) - dense for name in (STANDARD, *names)} for layer in range(layers)
    ]


def least_exposed(layers: int, names: Sequence[str]) -> int:
    """What no choice can go below."""
    return exposed((STANDARD,) * layers) + sum(min(units.values()) for units in exposures(layers, names))


def last(layers: int, name: str, budget: int | None, most_exposed: int | None) -> Choice:
    """The papers' choice: the last `budget` layers, or as few as let a token wait for no more than `most_exposed`.

    All layers have to be enough for that.
    """
    choices = [(STANDARD,) * (layers - count) + (name,) * count for count in range(layers + 1)]
    if budget is not None:
        return choices[budget]
    assert most_exposed is not None, "there is one of both budgets"
    return next(choice for choice in choices if exposed(choice) <= most_exposed)


def _only(layer: int, name: str, layers: int) -> Choice:
    return (STANDARD,) * layer + (name,) + (STANDARD,) * (layers - layer - 1)
