"""Requests that the tests of `rewired select` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewired.select.request import SelectRequest
from rewired.select.scores import LayerScore
from rewired.select.select import select

TOKENS = 4096


def ask(text: Path, wirings: str = "ladder", **changes: Any) -> SelectRequest:
    return SelectRequest(wirings, **({"budget": 2, "text": str(text), "tokens": TOKENS, "measure": False} | changes))


def scored(dense: Path, text: Path, out: Path, wiring: str = "ladder", **changes: Any) -> dict[int, LayerScore]:
    return select(str(dense), out, ask(text, wiring, **changes)).cache.read(wiring)
