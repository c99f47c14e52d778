"""The wirings that layers are chosen among, and what a choice saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rewired.model.layer_ranges import as_ranges
from rewired.model.wiring import Wiring

from .choice import STANDARD, Choice

MIX = "mix"
Amount = Callable[[Choice], int]  # what a token takes of something, which adds up over the layers

# a layer of each of these stands for itself: it reduces all before the next one begins
WIRINGS: dict[str, dict[str, Any]] = {
    "ladder": {"preset": "ladder"},
    "ladder-peek": {"preset": "ladder", "peek": True},
    "parallel": {"preset": "parallel"},
    "parallel-overlap": {"preset": "parallel", "overlap": True},
    "desync-2x": {"preset": "desync", "every": 2},
    "desync-2x-int4": {"preset": "desync", "every": 2, "payload": "int4"},
    "int4": {"preset": "standard", "payload": "int4"},
    "int8": {"preset": "standard", "payload": "int8"},
}
# what may be asked for: one of them; what Sync-Point Drop (arXiv 2502.20727) does; the best of several for each layer
NAMES = {name: (name,) for name in WIRINGS} | {
    "spd": ("desync-2x",),
    MIX: ("ladder", "ladder-peek", "parallel", "desync-2x"),
}
BYTES_MIX = ("desync-2x-int4", "int4", "desync-2x", "int8")  # where bytes are what is saved


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


def sent(choice: Choice, hidden_size: int) -> int:
    """How many bytes a token's reductions carry, in 16 bits where they are not packed."""
    modules = Wiring.from_json(entries(choice), len(choice), hidden_size).modules
    return sum(module.payload_bytes(2) for module in modules)


def units(layers: int, names: Sequence[str], amount: Amount) -> list[dict[str, int]]:
    """What a token takes more than of the dense model, for each layer and wiring.

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
