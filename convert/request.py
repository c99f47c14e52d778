"""A conversion as it is asked for, and the name that its output gets from that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.model.regions import Region
from rewired.model.wiring_text import region_name
from rewired.refit.request import RefitRequest
from rewired.rotate.request import check_kind

_MOST_RANGES = 4  # that a default name spells out


@dataclass(frozen=True)
class Request:
    """What to make of a checkpoint: wiring entries in their JSON form, and how to write the result."""

    wiring: Sequence[Mapping[str, Any]] = ()
    tp_shards: int | None = None
    to_stock: bool = False
    dtype: str | None = None
    copy: bool = False
    rotate: str | None = None
    refit: RefitRequest | None = None
    retrain: bool = False  # whether weights of another wiring, trained or fitted, will do, since the result is trained
    command: str = "rewired.convert.convert(...)"  # what the model card names as the command that made it

    def __post_init__(self) -> None:
        if self.rotate is not None:
            check_kind(self.rotate)


def default_name(source: str, checkpoint: Checkpoint, request: Request) -> str:
    """What is done to `source`, as a folder's name: `llama-3.1-8b-ladder-16-32`."""
    named = checkpoint.shape.wiring(request.wiring).rewired_regions
    parts = [_slug(region) for region in named]
    if request.rotate:
        parts.append(request.rotate)
    if request.refit and (named or checkpoint.is_rewired):
        parts.append("refit" if request.refit.matrices else "calibrated")
    if not parts:
        parts = ["stock" if request.to_stock else "standard" if request.wiring else "rewired"]
    return "-".join([source, *parts])


def _slug(region: Region) -> str:
    """A region in a file name: `ladder-peek-16-32`, `desync-4x-8-16`, `partial-0.5-0-4_8-12`, `ladder-20-layers`."""
    layers = region.layers
    if len(region.ranges) > _MOST_RANGES:
        layers = f"{len(region.layer_indices)} layers"
    words = re.sub("-(?=peek|overlap)", "-no-", region_name(region)) + f" {layers}".replace(",", "_")
    return re.sub(r"[^\w.-]+", "-", words)
