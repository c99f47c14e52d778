"""The contenders of a bench: wirings by their texts, and what they are compared with.

`standard` is the baseline, the stock model's function by our model; `none` is that without any communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rewired.checkpoint.shape import Shape
from rewired.model.presets import STANDARD
from rewired.model.wiring_text import NONE, parse_wiring

__all__ = ["NONE", "OWN", "STANDARD", "STOCK", "Contender", "contenders"]  # rows of a bench have these names
STOCK = "stock"  # transformers' own class, by its own tensor parallelism
OWN = "own"  # the wiring that the checkpoint has


class Contender(NamedTuple):
    """A model to time: the regions of its wiring in their JSON form. The stock model has none."""

    name: str
    entries: list[dict[str, Any]]


def contenders(names: Sequence[str], shape: Shape, own: list[dict[str, Any]]) -> list[Contender]:
    """Stock, standard, and those of `names` (`ladder+peek@16-32`, `desync-4x+int4`, ...); `own` is a checkpoint's.

    Raises ValueError for a name that means nothing, or a wiring that the model cannot have.
    """
    return [Contender(name, _entries(name, shape, own)) for name in dict.fromkeys([STOCK, STANDARD, *names])]


def _entries(name: str, shape: Shape, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if name in (STOCK, STANDARD, NONE):
        return []
    try:
        if name == OWN and not own:
            raise ValueError("This is the wiring of a rewired checkpoint, and this model has none.")
        entries = own if name == OWN else parse_wiring(name)
        shape.wiring(entries)
    except ValueError as error:
        raise ValueError(f"--wirings {name}: {error}") from None
    return entries
