"""The quality that a wiring costs, as measured: SmolLM2's frontier, or that of a model by `rewired select`."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from rewired.checkpoint.shape import Shape
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import parse_wiring, region_name, wiring_text

from .wirings import Candidate


@dataclass(frozen=True)
class Quality:
    """KL(original || rewired) in nats per token, and where it comes from."""

    kl: float
    source: str


def quality(candidate: Candidate) -> Quality | None:
    """What the model costs that its command makes; None where that was not measured.

    SmolLM2's KL is interpolated over the number of last layers, between measured ones of the same wiring; no layers
    cost nothing.
    """
    if candidate.kl is not None:
        return Quality(candidate.kl, "measured by select")
    if not candidate.is_rewired:
        return Quality(0.0, "original") if candidate.communicates else None
    name, share = _last_layers(candidate.wiring)
    points = _measured().get(name)
    if points is None:
        return None
    shares = sorted(points)
    kl = float(np.interp(share, shares, [points[each] for each in shares]))
    how = "measured" if share in points else "interpolated"
    return Quality(kl, f"SmolLM2, {share:.0%} of layers, {how}")


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
        raise ValueError(f"{file} is not a selection.json of `rewired select`.") from None
    return [first, *found[1:]]


def _selected(entry: dict[str, Any], shape: Shape) -> Candidate:
    wiring = shape.wiring(entry["wiring"])
    measured = entry.get("measured") or {}
    return Candidate(f"{entry['name']}: {wiring_text(wiring.regions)}", wiring, measured.get("refitted"))


@cache
def _measured() -> Mapping[str, Mapping[float, float]]:
    """KL on prose by wiring, less its layers, and by the share of the layers that it has, the last ones."""
    text = (files("rewired.plan") / "frontier.csv").read_text("utf-8")
    points: dict[str, dict[float, float]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        wiring = Wiring.from_json(parse_wiring(row["wiring"]), int(row["layers"]), hidden_size=1)
        name, share = _last_layers(wiring)
        points.setdefault(name, {0.0: 0.0})[share] = float(row["prose"])
    return points
