"""A refit as it is asked for; without torch, so that a bad request is refused before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

from rewired.text import MIX

_MOST_TOKENS = 10**9


@dataclass(frozen=True)
class RefitRequest:
    """What to fit, the gains of peeking modules or the matrices of all rewired ones, and the text to calibrate on."""

    text: str = MIX
    tokens: int = 32_768
    gains: bool = False
    matrices: bool = True


def check_fitting(flag: str, tokens: int) -> None:
    """Raise ValueError for tokens, asked for with `flag`, that make no sense."""
    if not 1 <= tokens <= _MOST_TOKENS:
        raise ValueError(f"{flag} {tokens} makes no sense: give a number from 1 to {_MOST_TOKENS}.")
