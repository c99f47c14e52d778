"""The wirings that are compared, and the layers that each may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewired.checkpoint.llama import LlamaShape
from rewired.model.wiring import Wiring
from rewired.select import wirings as select_wirings

STANDARD, UPPER = "standard", "none"  # none: no communication at all, which computes something wrong

# those that `rewired select` knows, and those that only make sense for several layers in a row
WIRINGS: Mapping[str, Mapping[str, Any]] = select_wirings.WIRINGS | {
    "desync-4x": {"preset": "desync", "every": 4},
    "partial-0.5": {"preset": "partial", "shared_fraction": 0.5},
    "int8": {"preset": "standard", "payload": "int8"},
    "int4/int8": {"preset": "standard", "payload": "int4/int8"},
    "int4": {"preset": "standard", "payload": "int4"},
    "ladder-peek-int8": {"preset": "ladder", "peek": True, "payload": "int8"},
    "desync-2x-int4": {"preset": "desync", "every": 2, "payload": "int4"},
}
SHARES = (8 / 30, 15 / 30, 22 / 30, 1.0)  # of the layers, the last ones: those whose quality was measured


@dataclass(frozen=True)
class Candidate:
    """A wiring of the last layers, or one that `rewired select` chose."""

    name: str  # one of WIRINGS, standard, none, or what a selection calls it
    layers: str
    wiring: Wiring
    share: float  # of the layers that are rewired
    kl: float | None = None  # of this very model, where it was measured
    file: Path | None = None  # for convert --wiring

    @property
    def communicates(self) -> bool:
        return self.name != UPPER

    @property
    def is_rewired(self) -> bool:
        return bool(self.wiring.rewired_regions)


def whole(shape: LlamaShape, name: str) -> Wiring:
    """All layers as `name`."""
    return shape.wiring([{"layers": "0-", **WIRINGS[name]}] if name in WIRINGS else [])


def candidates(shape: LlamaShape) -> list[Candidate]:
    """Standard, every preset on the last layers of each of SHARES, and the bound of what can be won."""
    dense, layers = shape.wiring([]), shape.num_hidden_layers
    starts = sorted({min(layers - 1, round(layers * (1 - share))) for share in SHARES}, reverse=True)
    rewired = [
        Candidate(
            name,
            f"{start}-{layers}",
            shape.wiring([{"layers": f"{start}-{layers}", **entry}]),
            (layers - start) / layers,
        )
        for name, entry in WIRINGS.items()
        for start in starts
    ]
    return [Candidate(STANDARD, "", dense, 0.0), *rewired, Candidate(UPPER, "", dense, 0.0)]
