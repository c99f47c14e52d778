"""Options of `convert` that are checked together: a file of regions, and what is to be fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewired.checkpoint.checkpoint import parse_json
from rewired.refit.request import RefitRequest, check_fitting
from rewired.text import MIX


def regions_in(file: Path) -> list[dict[str, Any]]:
    """The regions of a file in YAML or JSON: a list, or a mapping that has it as `wiring`, as recipes and config.json
    do. Raises ValueError where there is none."""
    if not file.is_file():
        raise ValueError(f"There is no file {file}: --wiring takes a list of regions in YAML or JSON.")
    content = _parse(file)
    regions = content.get("wiring") if isinstance(content, dict) else content
    if not isinstance(regions, list):
        raise ValueError(f"{file} holds no list of regions, such as [{{layers: 16-32, preset: ladder}}].")
    return regions


def _parse(file: Path) -> Any:
    """JSON is nearly YAML: of a file that says it is, the errors are those of JSON."""
    if file.suffix == ".json":
        return parse_json(file)
    import yaml

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is neither YAML nor JSON that can be read ({reason}).") from None


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
