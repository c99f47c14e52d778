"""Choices of layers to rewire, and how: what one saves, and the one that costs least quality within a budget."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewired.model.presets import STANDARD
from rewired.model.regions import ranges_of_layers
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import parse_wiring, parse_wirings, region_name

Choice = tuple[str, ...]  # the wiring of each layer, by name; STANDARD of those that are not chosen
Amount = Callable[[Choice], int]  # what a token takes of something, which adds up over the layers

MIX = "mix"
EXPOSED_MIX = ("ladder", "ladder+peek", "parallel", "desync-2x")  # what MIX is where all-reduces are saved
BYTES_MIX = ("desync-2x+int4", "standard+int4", "desync-2x", "standard+int8")  # and where bytes are


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


def names(wirings: str) -> tuple[str, ...]:
    """The wirings in a text that parts them by `;`, without layers, as they are printed.

    Raises ValueError for those of which a layer does not stand for itself, reducing all before the next one begins.
    """
    found = []
    for text in parse_wirings(wirings):
        if len(parse_wiring(text)) > 1 or "@" in text:
            raise ValueError(f"'{text}' names layers, which select chooses: leave them out.")
        wiring = Wiring.from_json(parse_wiring(f"{text}@0-2"), 3, hidden_size=64)
        if not wiring.rewired_regions:
            raise ValueError(f"'{text}' is what unchosen layers stay: name another wiring.")
        if wiring.modules[1].reduce != "all":
            raise ValueError(f"Layers cannot be chosen one by one for '{text}', which reduces all after several only.")
        found.append(region_name(wiring.rewired_regions[0]))
    return tuple(dict.fromkeys(found))


def entries(choice: Choice) -> list[dict[str, Any]]:
    """The wiring that rewires what was chosen, in its JSON form; standard layers are left out."""
    regions = []
    for name in dict.fromkeys(choice):
        if name != STANDARD:
            layers = ranges_of_layers(layer for layer, own in enumerate(choice) if own == name)
            regions += parse_wiring(f"{name}@{','.join(map(str, layers))}")
    return regions


def dense_layers(choice: Choice) -> int:
    return choice.count(STANDARD)


def exposed(choice: Choice) -> int:
    """How many all-reduces a token waits for."""
    return Wiring.from_json(entries(choice), len(choice), hidden_size=1).exposed


def sent(choice: Choice, hidden_size: int) -> int:
    """How many bytes a token's reductions carry, in 16 bits where they are not packed."""
    modules = Wiring.from_json(entries(choice), len(choice), hidden_size).modules
    return sum(module.payload_bytes(2) for module in modules)


def units(layers: int, names: Sequence[str], amount: Amount) -> list[dict[str, int]]:
    """Bytes (or waits) per token beyond the dense model's, for each layer and wiring.

    An all-reduce is waited for by who reads next, so what layers save adds up.
    """
    dense = (STANDARD,) * layers
    whole = amount(dense)
    return [
        {name: amount((*dense[:layer], name, *dense[layer + 1 :])) - whole for name in (STANDARD, *names)}
        for layer in range(layers)
    ]


def least(layers: int, names: Sequence[str], amount: Amount) -> int:
    """What no choice can go below."""
    return amount((STANDARD,) * layers) + sum(min(own.values()) for own in units(layers, names, amount))


def last(layers: int, name: str, amount: Amount, most: int) -> Choice:
    """The papers' choice: as few of the last layers as let a token take no more than `most` of an amount, or all."""
    choices = [(STANDARD,) * (layers - count) + (name,) * count for count in range(layers + 1)]
    return next((choice for choice in choices if amount(choice) <= most), choices[-1])
