"""What the options of `convert` mean together: the regions that they name, and what is fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewired.checkpoint.checkpoint import parse_json
from rewired.refit.request import RefitRequest, check_fitting
from rewired.text import MIX

Presets = dict[str, tuple[str | None, dict[str, Any]]]  # of each preset its layers and its own options


def regions_of(presets: Presets, modifiers: dict[str, Any]) -> list[dict[str, Any]]:
    """The regions that options name. Raises ValueError where an option has no layers to go with."""
    _check_options_have_layers(presets, modifiers)
    return [
        {"layers": layers, "preset": preset, **options, **modifiers}
        for preset, (layers, options) in presets.items()
        if layers is not None
    ]


def _check_options_have_layers(presets: Presets, modifiers: dict[str, Any]) -> None:
    """An option such as --desync-every means nothing without the layers it belongs to."""
    if all(layers is None for layers, _ in presets.values()):
        for name, value in modifiers.items():
            if value is not None:
                flag = name.replace("_", "-")
                raise ValueError(
                    f"--{flag} goes with the layers to rewire: name them, for example --ladder-layers 16-32."
                )
    for option in {name for _, options in presets.values() for name in options}:
        owners = {preset: layers for preset, (layers, options) in presets.items() if option in options}
        given = any(presets[preset][1][option] is not None for preset in owners)
        if given and not any(layers is not None for layers in owners.values()):
            needed = " or ".join(f"--{preset}-layers" for preset in owners)
            flag = {"every": "desync-every"}.get(option, option.replace("_", "-"))
            raise ValueError(f"--{flag} goes with {needed}: say which layers it is for.")


def regions_in(file: Path) -> list[dict[str, Any]]:
    """The regions of a JSON file. Raises ValueError where it has none."""
    if not file.is_file():
        raise ValueError(f"There is no file {file}: --wiring takes a JSON list of regions.")
    found = parse_json(file)
    if not isinstance(found, list):
        raise ValueError(f'{file} holds no list of regions, such as [{{"layers": "16-32", "preset": "ladder"}}].')
    return found


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
