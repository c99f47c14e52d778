"""Scores turned into choices: which layers within a budget, and which the paper would have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewired.layer_ranges import as_ranges
from rewired.wiring import parse_wiring, resolve

from ..llama import LlamaShape
from ..plan import Traffic
from .choice import STANDARD, Choice, Price, choose
from .scores import Scores

# a layer of each of these stands for itself: it reduces all before the next one begins
WIRINGS: dict[str, dict[str, Any]] = {
    "ladder": {"preset": "ladder"},
    "ladder-peek": {"preset": "ladder", "peek": True},
    "parallel": {"preset": "parallel"},
    "parallel-overlap": {"preset": "parallel", "overlap": True},
    "desync-2x": {"preset": "desync", "every": 2},
}
SPD = "desync-2x"  # what Sync-Point Drop (arXiv 2502.20727) does to a layer
MIXED = ("ladder", "ladder-peek", "parallel", "desync-2x")


@dataclass(frozen=True)
class Candidate:
    """A choice of layers. `predicted` is the sum of its layers' scores; KL in nats a token, on held-out tokens."""

    name: str
    wiring: list[dict[str, Any]]  # as config.json has it, standard layers left out
    layers: int
    exposed: int
    predicted: float
    converted: float | None = None  # measured
    refitted: float | None = None


class Picker:
    """Choices for a model of `shape`, of the wirings `names`, by their `scores`."""

    def __init__(self, shape: LlamaShape, names: Sequence[str], scores: Scores) -> None:
        self.shape, self.names, self.layers = shape, names, shape.num_hidden_layers
        self.price = Price(
            [{name: scores.found[name][layer].single for name in names} for layer in range(self.layers)],
            # neighbours of two kinds were not measured together: halfway between the kinds
            lambda layer, one, other: (scores.excess(one, layer) + scores.excess(other, layer)) / 2,
        )
        self.dense = self._exposed((STANDARD,) * self.layers)

    def best(self, budget: int | None, exposed: int | None) -> Choice:
        """Exactly `budget` layers, or at most `exposed` all-reduces to wait for."""
        if budget is not None:
            units = [{STANDARD: 0} | dict.fromkeys(self.names, 1) for _ in range(self.layers)]
            choice = choose(self.price, units, [budget])
        else:
            assert exposed is not None
            # an all-reduce is waited for by who reads next, so that what layers save adds up
            units = [
                {name: self._exposed(self._one(layer, name)) - self.dense for name in (STANDARD, *self.names)}
                for layer in range(self.layers)
            ]
            choice = choose(self.price, units, range(-self.dense, exposed - self.dense + 1))
        if choice is None:
            raise ValueError(
                f"No choice of {' and '.join(self.names)} layers lets a token wait for at most {exposed} all-reduces: "
                f"with all of them rewired it is {min(self._exposed((name,) * self.layers) for name in self.names)}."
            )
        return choice

    def last(self, budget: int | None, exposed: int) -> Choice:
        """The paper's choice: the last `budget` layers, or as few as it takes to wait for no more than `exposed`."""
        name = self.names[0]
        choices = [(STANDARD,) * (self.layers - n) + (name,) * n for n in range(self.layers + 1)]
        if budget is not None:
            return choices[budget]
        return next((choice for choice in choices if self._exposed(choice) <= exposed), choices[-1])

    def candidate(self, name: str, choice: Choice) -> Candidate:
        count = len(choice) - choice.count(STANDARD)
        return Candidate(name, entries(choice), count, self._exposed(choice), self.price.of(choice))

    def _one(self, layer: int, name: str) -> Choice:
        return (STANDARD,) * layer + (name,) + (STANDARD,) * (self.layers - layer - 1)

    def _exposed(self, choice: Choice) -> int:
        modules = resolve(parse_wiring(entries(choice), self.layers), self.layers, self.shape.hidden_size)
        return Traffic.of(modules, tp_shards=1, item_bytes=1).exposed


def entries(choice: Choice) -> list[dict[str, Any]]:
    """The wiring that rewires what was chosen, in its JSON form."""
    found = []
    for name in dict.fromkeys(choice):
        if name != STANDARD:
            modules = {2 * layer + half for layer, own in enumerate(choice) if own == name for half in (0, 1)}
            found.append({"layers": ",".join(map(str, as_ranges(modules))), **WIRINGS[name]})
    return found
