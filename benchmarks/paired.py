"""Timing of two functions in turns, so that what slows the machine down slows both: only their ratio is reported."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles

from rewired.bench.timing import timed

Pairs = list[tuple[float, float]]  # stock's seconds, and those of the model beside it


def interleaved(stock: Callable[[], None], other: Callable[[], None], pairs: int) -> Pairs:
    """The seconds of both, run A B, B A, A B, ... after a warm-up of each."""
    for run in (stock, other, stock, other):
        run()
    times = []
    for pair in range(pairs):
        if pair % 2:
            others, stocks = timed(other), timed(stock)
        else:
            stocks, others = timed(stock), timed(other)
        times.append((stocks, others))
    return times


def speed(pairs: Pairs) -> str:
    """The median of the pairs' ratios, with the quartiles."""
    low, middle, high = quantiles(ratios(pairs), n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def ratios(pairs: Pairs) -> list[float]:
    return [stock / other for stock, other in pairs]


def milliseconds(pairs: Pairs) -> str:
    """The median of stock's times, and that of the other's."""
    return ", ".join(f"{1e3 * median(times):.0f}" for times in zip(*pairs, strict=True))
