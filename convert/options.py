"""Options of `convert` that take more than a flag: the wiring, and what is fitted."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import Any

import yaml

from rewired.model.presets import STANDARD
from rewired.model.wiring_text import parse_wiring
from rewired.refit.request import RefitRequest, check_fitting
from rewired.text import MIX


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
