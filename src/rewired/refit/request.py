"""A refit as it is asked for; without torch, so that a bad request is refused before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rewired.text import MIX

_MOST_TOKENS = 10**9


@dataclass(frozen=True)
class RefitRequest:
    """What to fit, the gains of peeking modules or the matrices of all rewired ones, and the text to calibrate on."""

    text: str = MIX
    tokens: int = 32_768
    gains: bool = False
    matrices: bool = True
    spill: Path | None = None  # the folder for files that hold activations, instead of memory


def check_fitting(flag: str, tokens: int, spill: Path | None) -> None:
    """Raise ValueError for tokens, asked for with `flag`, that make no sense, or a missing folder to spill to."""
    if not 1 <= tokens <= _MOST_TOKENS:
        raise ValueError(f"{flag} {tokens} makes no sense: give a number from 1 to {_MOST_TOKENS}.")
    if spill is not None and not spill.is_dir():
        raise ValueError(f"There is no folder {spill} to spill to: make it first.")
