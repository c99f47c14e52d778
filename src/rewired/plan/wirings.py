"""The wirings that are compared: their texts, of which layers, and what each costs in quality."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rewired.checkpoint.named_shapes import find_checkpoint, named_shape
from rewired.checkpoint.shape import Shape
from rewired.measured_kl import smollm2_gates, smollm2_kl
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
DELAYED = "ladder+peek+delay-2"  # priced in all layers, to say where it pays: its KL is not measured
SHARES = (8 / 30, 15 / 30, 22 / 30, 1.0)  # of the layers, the last ones: those whose quality was measured


class Quality(NamedTuple):
    """KL(original || rewired) in nats per token, and where it comes from."""

    kl: float
    source: str


@dataclass(frozen=True)
class Candidate:
    """A wiring to price."""

    name: str  # its text, `none`, or what a selection calls it
    wiring: Wiring
    measured_kl: float | None = None  # of this very model, where select has measured it
    file: Path | None = None  # for convert --wiring

    @property
    def communicates(self) -> bool:
        return self.name != NONE

    @property
    def is_rewired(self) -> bool:
        return bool(self.wiring.rewired_regions)

    @cached_property
    def quality(self) -> Quality | None:
        """What the model costs that its command makes; None where that was not measured."""
        if self.measured_kl is not None:
            return Quality(self.measured_kl, "measured by select")
        if not self.is_rewired:
            return Quality(0.0, "original") if self.communicates else None
        measured = smollm2_kl(self.wiring)
        if measured is None or measured.fitted is None:
            return None
        how = "interpolated" if measured.is_interpolated else "measured"
        return Quality(measured.fitted, f"SmolLM2, {measured.share:.0%} of layers, {how}")

    @property
    def gates(self) -> Sequence[str]:
        """What gates found in SmolLM2; nothing where they were not asked, or where the KL is another model's."""
        return smollm2_gates(self.wiring) if self.is_rewired and self.measured_kl is None else []


def dense_shape(model: str) -> Shape:
    """Of the model that wirings are planned for. Raises ValueError if there is none, or it is rewired itself."""
    if shape := named_shape(model):
        return shape
    checkpoint = find_checkpoint(model)
    if checkpoint.wiring.rewired_regions:
        raise ValueError(f"{model} is rewired already: plan for the dense model that it was made from.")
    return checkpoint.shape


@cache
def wiring_of(shape: Shape, text: str) -> Wiring:
    """Raises ValueError for a text that is not a wiring of this model."""
    return shape.wiring([] if text == NONE else parse_wiring(text))


def candidates(shape: Shape, texts: Iterable[str] | None = None) -> list[Candidate]:
    """Standard, `texts`, and the bound of what can be won; by default, RANKED on the last layers of each of SHARES,
    and DELAYED.

    Raises ValueError for a text that is not a wiring of this model.
    """
    found = {
        NONE if text == NONE else wiring_text(wiring_of(shape, text).regions): wiring_of(shape, text)
        for text in [STANDARD, *(_ranked(shape.num_hidden_layers) if texts is None else texts), NONE]
    }
    return [Candidate(name, wiring) for name, wiring in found.items()]


def _ranked(layers: int) -> Sequence[str]:
    starts = sorted({min(layers - 1, round(layers * (1 - share))) for share in SHARES}, reverse=True)
    return (*(f"{text}@{start}-{layers}" for text in RANKED for start in starts), DELAYED)


def selected(file: Path, shape: Shape) -> list[Candidate]:
    """The candidates in a selection.json of `rewired select`. Raises ValueError where it is none."""
    if not file.is_file():
        raise ValueError(f"There is no file {file}: --frontier takes a selection.json of `rewired select`.")
    try:
        entries = json.loads(file.read_text("utf-8"))["candidates"]
        found = [_selected(entry, shape) for entry in entries]
        first = replace(found[0], file=file.with_name("wiring.json"))  # which is this one's alone
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{file} is not a selection.json of `rewired select`.") from None
    return [first, *found[1:]]


def _selected(entry: dict[str, Any], shape: Shape) -> Candidate:
    wiring = shape.wiring(entry["wiring"])
    kl = (entry.get("measured") or {}).get("refitted")
    if type(kl) not in (int, float, type(None)):
        raise TypeError
    return Candidate(f"{entry['name']}: {wiring_text(wiring.regions)}", wiring, kl)
