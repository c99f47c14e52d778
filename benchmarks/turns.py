"""Steps timed in turns, so that what slows the machine down slows all of them: only ratios are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median, quantiles

from rewired.bench.timing import interleaved, timed

Seconds = dict[str, list[float]]  # of each step, by round


def in_turns(steps: Mapping[str, Callable[[], None]], rounds: int) -> Seconds:
    """On the slowest rank, after two runs of each."""
    for step in 2 * list(steps.values()):
        step()
    runs = {name: partial(_measured, step) for name, step in steps.items()}
    return {name: samples[""] for name, samples in interleaved(runs, rounds, "round").items()}


def _measured(step: Callable[[], None]) -> dict[str, float]:
    return {"": timed(step)}


def faster(base: Sequence[float], other: Sequence[float]) -> str:
    """How many times as fast the other is: the median of the rounds' ratios, with the quartiles."""
    ratios = [one / two for one, two in zip(base, other, strict=True)]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return f"{median(ratios):.3f} ({low:.3f} to {high:.3f})"
