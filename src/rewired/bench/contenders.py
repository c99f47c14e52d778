"""The contenders of a bench: wirings by the names that users give them, and what they are compared with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewired.checkpoint.llama import LlamaShape
from rewired.model.presets import MODIFIERS, PRESETS

STOCK = "stock"  # transformers' own Llama, by its own tensor parallelism
STANDARD = "standard"  # the same function by our model: the baseline
NONE = "none"  # standard without any communication: wrong outputs, and the most that can be won
OWN = "own"  # the wiring that the checkpoint has

_SWITCHES = tuple(option.name for option in MODIFIERS if option.type is bool)
_PAYLOAD = r"int[48](?:/int[48])?"  # of all channels: a table's commas would part names
_NAME = re.compile(rf"([a-z]+)(?:-([\d.]+)x?)?((?:[+-](?:{'|'.join(_SWITCHES)}))*)(?:\+({_PAYLOAD}))?(?::(.+))?")


@dataclass(frozen=True)
class Contender:
    """A model to time: the regions of its wiring in their JSON form. Stock Llama has none."""

    name: str
    entries: list[dict[str, Any]]

    @property
    def is_stock(self) -> bool:
        return self.name == STOCK

    @property
    def communicates(self) -> bool:
        return self.name != NONE


def contenders(names: Sequence[str], shape: LlamaShape, own: list[dict[str, Any]]) -> list[Contender]:
    """Stock, standard, and those of `names` (`ladder+peek:16-32`, `desync-4x+int4`, ...); `own` is a checkpoint's.

    Raises ValueError for a name that means nothing, or a wiring that the model cannot have.
    """
    entries = {name: _entries(name, own) for name in dict.fromkeys([STOCK, STANDARD, *names])}
    for name, regions in entries.items():
        try:
            shape.wiring(regions)
        except ValueError as error:
            raise ValueError(f"--wirings {name}: {error}") from None
    return [Contender(name, regions) for name, regions in entries.items()]


def _entries(name: str, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if name == OWN:
        if not own:
            raise ValueError(f"--wirings {OWN} is the wiring of a rewired checkpoint, and this model has none.")
        return own
    if name in (STOCK, STANDARD, NONE):
        return []
    matched = _NAME.fullmatch(f"{STANDARD}+{name}" if re.match(_PAYLOAD, name) else name)
    if not matched or matched[1] not in PRESETS:
        raise ValueError(
            f"--wirings {name} is no wiring: give {', '.join(PRESETS)}, {NONE}, or {OWN}, with a value (desync-4x, "
            f"partial-0.5), {' or '.join(f'+{switch}' for switch in _SWITCHES)}, a payload (int8, ladder+int4, "
            "int4/int8), and layers (ladder:16-32) where you want them."
        )
    preset, value, switches, payload, layers = matched.groups()
    options = _value(name, preset, value) | _switched_on(switches) | ({"payload": payload} if payload else {})
    return [{"layers": layers or "0-", "preset": preset, **options}]


def _value(name: str, preset: str, value: str | None) -> dict[str, Any]:
    """The first option that a preset has of its own is the number in its name."""
    if value is None:
        return {}
    if not PRESETS[preset].options:
        raise ValueError(f"--wirings {name}: '{preset}' takes no number.")
    option = PRESETS[preset].options[0]
    try:
        return {option.name: option.type(value)}
    except ValueError:
        raise ValueError(f"--wirings {name}: {value} is no value of {option.name}, {option.wanted}.") from None


def _switched_on(switches: str) -> dict[str, bool]:
    return dict.fromkeys(re.findall(r"\w+", switches), True)
