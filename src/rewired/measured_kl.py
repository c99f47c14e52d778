"""What wirings cost on SmolLM2-135M, and which gates it passed with them, as measured: the tables beside this file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from rewired.model.wiring import Wiring
from rewired.model.wiring_text import parse_wiring, region_name


class MeasuredKL(NamedTuple):
    """KL(original || rewired) on prose, in nats per token; each None where it was not measured."""

    share: float  # of the layers that are rewired, the last ones
    converted: float | None
    fitted: float | None  # as one makes the model: refitted, or as converted where nothing can be fitted
    is_interpolated: bool


def smollm2_kl(wiring: Wiring) -> MeasuredKL | None:
    """What `wiring` costs SmolLM2 in as large a share of its layers; None unless it is one region of the last ones.

    Between the numbers of layers that were measured it is interpolated; no layers cost nothing.
    """
    name, share = _last_layers(wiring)
    converted, fitted = _measured(False).get(name), _measured(True).get(name)
    points = fitted or converted
    if not points:
        return None
    return MeasuredKL(share, _at(share, converted), _at(share, fitted), share not in points)


def smollm2_gates(wiring: Wiring) -> Sequence[str]:
    """What each gate found where `wiring` takes as large a share of SmolLM2's layers: `recommended: failed`, say."""
    name, share = _last_layers(wiring)
    return _verdicts().get((name, share), []) if name else []


def _at(share: float, points: Mapping[float, float] | None) -> float | None:
    if points is None:
        return None
    shares = sorted(points)
    return float(np.interp(share, shares, [points[each] for each in shares]))


def _last_layers(wiring: Wiring) -> tuple[str, float]:
    """What the last layers are, and their share of all; no name, where others are rewired."""
    region = wiring.rewired_regions[0]
    start = region.ranges[0].start
    is_it = region.layers == f"{start}-{wiring.num_layers}"
    return region_name(region) if is_it else "", 1 - start / wiring.num_layers


@cache
def _measured(is_fitted: bool) -> Mapping[str, Mapping[float, float]]:
    """By wiring, less its layers, and by the share of the layers that it has."""
    points: dict[str, dict[float, float]] = {}
    for row in _rows("measured_kl.csv"):
        needs_no_fit = row["wiring"].startswith("standard")
        if needs_no_fit or is_fitted == (row["weights"] == "refit"):
            name, share = _last_layers(_wiring(row))
            points.setdefault(name, {0.0: 0.0})[share] = float(row["prose"])
    return points


@cache
def _verdicts() -> Mapping[tuple[str, float], Sequence[str]]:
    """By the wiring, less its layers, and the share of the layers that it has."""
    found: dict[tuple[str, float], list[str]] = {}
    for row in _rows("measured_gates.csv"):
        asked = f"{row['gate']}, {row['weights']}" if row["weights"] else row["gate"]
        found.setdefault(_last_layers(_wiring(row)), []).append(f"{asked}: {row['verdict']}")
    return found


def _rows(name: str) -> Iterable[Mapping[str, str]]:
    text = files("rewired").joinpath(name).read_text("utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


def _wiring(row: Mapping[str, str]) -> Wiring:
    return Wiring.from_json(parse_wiring(row["wiring"]), int(row["layers"]), hidden_size=1)
