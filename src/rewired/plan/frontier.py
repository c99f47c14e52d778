"""The quality that a wiring costs, as measured: SmolLM2's frontier, or that of a model by `rewired select`."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rewired.checkpoint.llama import LlamaShape
from rewired.model.wiring_text import wiring_text

from .wirings import Candidate

_TOLERANCE = 0.02  # of a share of layers: rounding, where the layers are others than SmolLM2's 30


@dataclass(frozen=True)
class Quality:
    """KL(original || rewired) in nats per token, and where it comes from."""

    kl: float
    is_refitted: bool
    source: str


@dataclass(frozen=True)
class _Point:
    wiring: str
    share: float  # of the layers, the last ones
    is_refitted: bool
    kl: float  # on prose


def quality(candidate: Candidate) -> Quality | None:
    """The KL of the nearest point measured for this wiring; None where there is none.

    After a refit, of as many layers or the next larger share that was measured; else as converted.
    """
    if candidate.kl is not None:
        return Quality(candidate.kl, True, "measured by select")
    if not candidate.is_rewired:
        return Quality(0.0, True, "original") if candidate.communicates else None
    points = [point for point in _points() if point.wiring == candidate.name]
    refitted = [point for point in points if point.is_refitted and point.share >= candidate.share - _TOLERANCE]
    nearest = min(refitted or points, key=lambda point: abs(point.share - candidate.share), default=None)
    if nearest is None:
        return None
    return Quality(nearest.kl, nearest.is_refitted, f"SmolLM2, {nearest.share:.0%} of layers")


def selected(file: Path, shape: LlamaShape) -> list[Candidate]:
    """The candidates in a selection.json of `rewired select`. Raises ValueError where it is none."""
    if not file.is_file():
        raise ValueError(f"There is no file {file}: --frontier takes a selection.json of `rewired select`.")
    try:
        entries = json.loads(file.read_text("utf-8"))["candidates"]
        found = [_selected(entry, shape) for entry in entries]
        first = replace(found[0], file=file.with_name("wiring.json"))  # which is this one's alone
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{file} is no selection.json of `rewired select`.") from None
    return [first, *found[1:]]


def _selected(entry: dict[str, Any], shape: LlamaShape) -> Candidate:
    wiring = shape.wiring(entry["wiring"])
    measured = entry.get("measured") or {}
    share = len(wiring.rewired_layers) / wiring.num_layers
    return Candidate(entry["name"], wiring_text(wiring), wiring, share, measured.get("refitted"))


@cache
def _points() -> Sequence[_Point]:
    text = (files("rewired.plan") / "frontier.csv").read_text("utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    points = []
    for row in rows:
        share = 1 - int(row["first"]) / int(row["layers"])
        points.append(_Point(row["wiring"], share, row["weights"] == "refit", float(row["prose"])))
    return points
