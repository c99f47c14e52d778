"""A conversion as it is asked for, by options of the command too, and the name that its output gets from that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any

import yaml

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.safetensors_header import check_dtype
from rewired.model.presets import STANDARD
from rewired.model.regions import Region
from rewired.model.wiring_text import parse_wiring, region_name
from rewired.refit.request import RefitRequest, check_fitting
from rewired.rotate.request import check_kind
from rewired.text import MIX

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
        if self.dtype is not None:
            check_dtype(self.dtype)
        if self.rotate is not None:
            check_kind(self.rotate)


def regions_of(wiring: str | None, ladder: str | None, peek: bool, standard: str | None) -> list[dict[str, Any]]:
    """The regions that all options name together, in their JSON form; `ladder` and `standard` are layers.

    Raises ValueError for a wiring that cannot be read, and for a `peek` without layers.
    """
    regions = [] if wiring is None else regions_in(wiring)
    if ladder is not None:
        regions.append({"layers": ladder, "preset": "ladder"} | ({"peek": True} if peek else {}))
    elif peek:
        raise ValueError("--peek goes with --ladder-layers: name them, for example --ladder-layers 16-32.")
    if standard is not None:
        regions.append({"layers": standard, "preset": STANDARD})
    return regions


def regions_in(wiring: str) -> list[dict[str, Any]]:
    """The regions of a text, or of a file in YAML or JSON: a text, a list, or a mapping that has it as `wiring`, as
    recipes and config.json do. Raises ValueError where there is none."""
    if not isfile(wiring):  # noqa: PTH113 - Path.is_file fails where a text is too long for a name
        if wiring.endswith((".yaml", ".yml", ".json")):
            raise ValueError(f"There is no file {wiring}.")
        return parse_wiring(wiring)
    try:
        content = yaml.safe_load(Path(wiring).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{wiring} is neither YAML nor JSON that can be read ({reason}).") from None
    regions = content.get("wiring") if isinstance(content, dict) else content
    if isinstance(regions, str):
        return parse_wiring(regions)
    if not isinstance(regions, list):
        raise ValueError(f"{wiring} holds no wiring, such as ladder@16-32 or [{{layers: 16-32, preset: ladder}}].")
    return regions


def refit_request(refit: str | None, calibrate: str | None, tokens: int | None) -> RefitRequest | None:
    """Raises ValueError where the options contradict each other."""
    if refit is None and calibrate is None:
        if tokens is not None:
            raise ValueError("--refit-tokens goes with --refit or --calibrate: say which of them you want.")
        return None
    texts = {text for text in (refit, calibrate) if text is not None} - {MIX}
    if len(texts) > 1:
        raise ValueError("--refit and --calibrate name different texts: both fit on one text, so name it once.")
    tokens = RefitRequest.tokens if tokens is None else tokens
    check_fitting("--refit-tokens", tokens)
    text = next(iter(texts), MIX)
    return RefitRequest(text, tokens, gains=calibrate is not None, matrices=refit is not None)


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
