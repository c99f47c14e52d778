"""The quality that a wiring costs, as measured: SmolLM2's frontier, or that of a model by `rewired select`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rewired.checkpoint.shape import Shape
from rewired.measured_kl import smollm2_kl
from rewired.model.wiring_text import wiring_text

from .wirings import Candidate


@dataclass(frozen=True)
class Quality:
    """KL(original || rewired) in nats per token, and where it comes from."""

    kl: float
    source: str


def quality(candidate: Candidate) -> Quality | None:
    """What the model costs that its command makes; None where that was not measured."""
    if candidate.kl is not None:
        return Quality(candidate.kl, "measured by select")
    if not candidate.is_rewired:
        return Quality(0.0, "original") if candidate.communicates else None
    measured = smollm2_kl(candidate.wiring)
    if measured is None or measured.fitted is None:
        return None
    how = "interpolated" if measured.is_interpolated else "measured"
    return Quality(measured.fitted, f"SmolLM2, {measured.share:.0%} of layers, {how}")


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
