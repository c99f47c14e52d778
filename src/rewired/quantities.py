"""Quantities in words, as commands and model cards print them: `1 layer`, `2 layers`, `35 MB`, `1.2 TFLOP`."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """So many of a thing, whose plural takes an s."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(number: float) -> str:
    """A number of bytes."""
    return _scaled(number, ("kB", "MB", "GB"))


def operations(number: float) -> str:
    """A number of floating-point operations."""
    return _scaled(number, ("MFLOP", "GFLOP", "TFLOP"), smallest=1e6)


def duration(seconds: float) -> str:
    """A time, to the precision of an estimate."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def _scaled(number: float, units: tuple[str, ...], smallest: float = 1e3) -> str:
    """In the largest unit of which there is one; no amount is nothing because it is small."""
    scaled, unit = number / smallest, units[0]
    for larger in units[1:]:
        if scaled < 1e3:
            break
        scaled, unit = scaled / 1e3, larger
    digits = f"{scaled:,.1f}" if scaled < 100 else f"{scaled:,.0f}"
    return f"{digits.removesuffix('.0')} {unit}"
