"""The wirings that are compared: their texts, and of which layers where that is not said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rewired.checkpoint.shape import Shape
from rewired.model.presets import STANDARD
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import NONE, parse_wiring, wiring_text

RANKED = (
    "ladder",
    "ladder+peek",
    "parallel",
    "parallel+overlap",
    "desync-2x",
    "desync-2x+int4",
    "standard+int4",
    "standard+int8",
    "desync-4x",
    "partial-0.5",
    "standard+int4/int8",
    "ladder+peek+int8",
)
SHARES = (8 / 30, 15 / 30, 22 / 30, 1.0)  # of the layers, the last ones: those whose quality was measured


@dataclass(frozen=True)
class Candidate:
    """A wiring to price."""

    name: str  # its text, `none`, or what a selection calls it
    wiring: Wiring
    kl: float | None = None  # of this very model, where it was measured
    file: Path | None = None  # for convert --wiring

    @property
    def communicates(self) -> bool:
        return self.name != NONE

    @property
    def is_rewired(self) -> bool:
        return bool(self.wiring.rewired_regions)

    @property
    def kind(self) -> str:
        """Its name less the layers."""
        return re.sub(r"@\S*?(?=, |$)", "", self.name)


@cache
def wiring_of(shape: Shape, text: str) -> Wiring:
    """Raises ValueError for a text that is not a wiring of this model."""
    return shape.wiring([] if text == NONE else parse_wiring(text))


def candidates(shape: Shape, texts: Iterable[str] | None = None) -> list[Candidate]:
    """Standard, `texts`, and the bound of what can be won; by default, RANKED on the last layers of each of SHARES.

    Raises ValueError for a text that is not a wiring of this model.
    """
    found = {
        NONE if text == NONE else wiring_text(wiring_of(shape, text).regions): wiring_of(shape, text)
        for text in [STANDARD, *(_ranked(shape.num_hidden_layers) if texts is None else texts), NONE]
    }
    return [Candidate(name, wiring) for name, wiring in found.items()]


def _ranked(layers: int) -> Iterator[str]:
    starts = sorted({min(layers - 1, round(layers * (1 - share))) for share in SHARES}, reverse=True)
    return (f"{text}@{start}-{layers}" for text in RANKED for start in starts)
