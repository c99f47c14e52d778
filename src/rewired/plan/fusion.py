"""All-reduces that an engine fuses with the residual's addition and the norm after them. Read from engines.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from .hardware import Hardware

SUFFIX = "-fused"  # of a library's name


@dataclass(frozen=True)
class Fusion:
    """What a fused kernel saves where its output is waited for at once; a wiring that hides or defers it has two."""

    saving: float  # seconds
    up_to: Mapping[int, float]  # bytes of the largest message that is fused, by number of GPUs

    def saved(self, size: float, gpus: int) -> float:
        return self.saving if size <= self.up_to.get(gpus, 0) else 0.0


NO_FUSION = Fusion(0.0, {})


def fusion_of(hardware: Hardware, library: str) -> Fusion:
    """Raises ValueError where engines do not fuse on this machine."""
    if not library.endswith(SUFFIX):
        return NO_FUSION
    table = _table()
    if hardware.name not in table["up_to"]:
        raise ValueError(
            f"Engines fuse no all-reduce on {hardware.title}: choose --library {library.removesuffix(SUFFIX)}."
        )
    return Fusion(table["saving"], {int(gpus): size for gpus, size in table["up_to"][hardware.name].items()})


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = tomllib.loads((files("rewired.plan") / "engines.toml").read_text("utf-8"))["fusion"]
    return table
