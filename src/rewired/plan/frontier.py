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

from rewired.checkpoint.shape import Shape
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import parse_wiring, region_name, wiring_text

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
    name: str  # of a wiring, less its layers
    share: float  # of the layers, the last ones
    is_refitted: bool
    kl: float  # on prose


def quality(candidate: Candidate) -> Quality | None:
    """The KL of the nearest point measured for this wiring of the last layers; None where there is none.

    After a refit, of as many layers or the next larger share that was measured; else as converted.
    """
    if candidate.kl is not None:
        return Quality(candidate.kl, True, "measured by select")
    if not candidate.is_rewired:
        return Quality(0.0, True, "original") if candidate.communicates else None
    name, share = _last_layers(candidate.wiring)
    points = [point for point in _points() if point.name == name]
    refitted = [point for point in points if point.is_refitted and point.share >= share - _TOLERANCE]
    nearest = min(refitted or points, key=lambda point: abs(point.share - share), default=None)
    if nearest is None:
        return None
    return Quality(nearest.kl, nearest.is_refitted, f"SmolLM2, {nearest.share:.0%} of layers")


def _last_layers(wiring: Wiring) -> tuple[str, float]:
    """What the last layers are, and their share of all; no name, where others are rewired."""
    region = wiring.rewired_regions[0]
    start = region.ranges[0].start
    is_it = region.layers == f"{start}-{wiring.num_layers}"
    return region_name(region) if is_it else "", 1 - start / wiring.num_layers


def selected(file: Path, shape: Shape) -> list[Candidate]:
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


def _selected(entry: dict[str, Any], shape: Shape) -> Candidate:
    wiring = shape.wiring(entry["wiring"])
    measured = entry.get("measured") or {}
    return Candidate(f"{entry['name']}: {wiring_text(wiring.regions)}", wiring, measured.get("refitted"))


@cache
def _points() -> Sequence[_Point]:
    text = (files("rewired.plan") / "frontier.csv").read_text("utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    points = []
    for row in rows:
        wiring = Wiring.from_json(parse_wiring(row["wiring"]), int(row["layers"]), hidden_size=1)
        points.append(_Point(*_last_layers(wiring), row["weights"] == "refit", float(row["prose"])))
    return points
