"""The choice of layers to rewire, and how, that costs least quality within a budget of communication."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

STANDARD = "standard"  # what a layer stays that is not chosen

Choice = tuple[str, ...]  # the wiring of each layer, by name


@dataclass(frozen=True)
class Price:
    """What wirings cost: `single[layer][name]`, and what two rewired neighbours cost beyond their sum."""

    single: Sequence[Mapping[str, float]]
    pair: Callable[[int, str, str], float]  # of `layer` and the one after it

    def of(self, choice: Choice) -> float:
        """Of a whole model, as the sum over its layers and pairs of neighbours."""
        return sum(
            self.step(layer, choice[layer - 1] if layer else STANDARD, name) for layer, name in enumerate(choice)
        )

    def step(self, layer: int, before: str, name: str) -> float:
        """What `layer` adds where the one before it is wired as `before`."""
        if name == STANDARD:
            return 0.0
        return self.single[layer][name] + (self.pair(layer - 1, before, name) if before != STANDARD else 0.0)


def choose(price: Price, units: Sequence[Mapping[str, int]], budgets: Container[int]) -> Choice | None:
    """The choice of least price whose `units[layer][name]` sum up to one of `budgets`; None if none does.

    Prices reach no further than a neighbour, so it is exact: dynamic programming over (wiring of the last layer, units
    spent).
    """
    best: dict[tuple[str, int], tuple[float, Choice]] = {(STANDARD, 0): (0.0, ())}
    for layer, options in enumerate(units):
        reached: dict[tuple[str, int], tuple[float, Choice]] = {}
        for (before, spent), (value, choice) in best.items():
            for name, cost in options.items():
                state, total = (name, spent + cost), value + price.step(layer, before, name)
                if state not in reached or total < reached[state][0]:
                    reached[state] = total, (*choice, name)
        best = reached
    ends = [end for (_, spent), end in best.items() if spent in budgets]
    return min(ends, key=lambda end: end[0])[1] if ends else None
