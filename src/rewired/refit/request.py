"""A refit as it is asked for; without torch, so that a bad request is refused before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

from rewired.text import MIX


@dataclass(frozen=True)
class RefitRequest:
    """What to fit, the gains of peeking modules or the matrices of all rewired ones, and the text to calibrate on."""

    text: str = MIX
    tokens: int = 32_768
    gains: bool = False
    matrices: bool = True

    def __post_init__(self) -> None:
        check_fitting("tokens", self.tokens)


def check_fitting(flag: str, tokens: int) -> None:
    """Raise ValueError for tokens, asked for with `flag`, that make no sense."""
    if tokens < 1:
        raise ValueError(f"{flag} {tokens} makes no sense: give a number of at least 1.")
