"""The wirings that layers are chosen among, and what a choice saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rewired.model.regions import ranges_of_layers
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import parse_wiring, parse_wirings, region_name

from .choice import STANDARD, Choice

MIX = "mix"
Amount = Callable[[Choice], int]  # what a token takes of something, which adds up over the layers

EXPOSED_MIX = ("ladder", "ladder+peek", "parallel", "desync-2x")  # what MIX is where all-reduces are saved
BYTES_MIX = ("desync-2x+int4", "standard+int4", "desync-2x", "standard+int8")  # and where bytes are


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
    dense = amount((STANDARD,) * layers)
    return [
        {name: amount(_only(layer, name, layers)) - dense for name in (STANDARD, *names)} for layer in range(layers)
    ]


def least(layers: int, names: Sequence[str], amount: Amount) -> int:
    """What no choice can go below."""
    return amount((STANDARD,) * layers) + sum(min(own.values()) for own in units(layers, names, amount))


def last(layers: int, name: str, budget: int | None, limit: tuple[Amount, int] | None) -> Choice:
    """The papers' choice: the last `budget` layers, or as few as let a token take no more than a `limit` of an amount.

    All layers have to be enough for that.
    """
    choices = [(STANDARD,) * (layers - count) + (name,) * count for count in range(layers + 1)]
    if budget is not None:
        return choices[budget]
    assert limit is not None, "there is one of both"
    amount, most = limit
    return next(choice for choice in choices if amount(choice) <= most)


def _only(layer: int, name: str, layers: int) -> Choice:
    return (STANDARD,) * layer + (name,) + (STANDARD,) * (layers - layer - 1)
