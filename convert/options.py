"""Options of `convert` that are checked together: a file of regions, and what is to be fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewired.checkpoint.checkpoint import parse_json
from rewired.refit.request import RefitRequest, check_fitting
from rewired.text import MIX


def regions_in(file: Path) -> list[dict[str, Any]]:
    """The regions of a JSON file. Raises ValueError where it has none."""
    if not file.is_file():
        raise ValueError(f"There is no file {file}: --wiring takes a JSON list of regions.")
    regions = parse_json(file)
    if not isinstance(regions, list):
        raise ValueError(f'{file} holds no list of regions, such as [{{"layers": "16-32", "preset": "ladder"}}].')
    return regions


def refit_request(
    refit: str | None, calibrate: str | None, tokens: int | None, spill: Path | None
) -> RefitRequest | None:
    """Raises ValueError where the options contradict each other."""
    if refit is None and calibrate is None:
        for flag, value in (("--refit-tokens", tokens), ("--spill", spill)):
            if value is not None:
                raise ValueError(f"{flag} goes with --refit or --calibrate: say which of them you want.")
        return None
    texts = {text for text in (refit, calibrate) if text is not None} - {MIX}
    if len(texts) > 1:
        raise ValueError("--refit and --calibrate name different texts: both are fitted on one, name it once.")
    tokens = RefitRequest.tokens if tokens is None else tokens
    check_fitting("--refit-tokens", tokens, spill)
    text = next(iter(texts), MIX)
    return RefitRequest(text, tokens, gains=calibrate is not None, matrices=refit is not None, spill=spill)
