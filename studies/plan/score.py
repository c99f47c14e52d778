"""How far off predicted speedups are: `python -m studies.plan.score`, by fits that left runs out, too.

It takes a minute. Speedups are ratios, and a point is a hundredth: from 1.31 to 1.33 are two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from rewired.model.presets import STANDARD

from . import caat_benchmark
from .fit import TEXT, fit
from .ladder_benchmark import (
    Run,
    predicted,
    predicted_speedups,
    published,
    repeats,
    speedups,
    timed,
    training_speedup,
)

Points = Mapping[Run, np.ndarray]  # predicted less measured speedups [3], of prefill, decoding and both
NOT_FITTED = (  # "around 30%" and "around 40%" of batches of 64; of which model it does not say
    *((Run(model, 64, 8, True, "desync-4x"), 1.30) for model in ("8b", "3b")),
    *((Run(model, 64, 8, False, "desync-4x"), 1.40) for model in ("8b", "3b")),
)
GROUPS: Mapping[str, Callable[[Run], Any]] = {
    "each (GPUs, batch)": lambda run: (run.tp, run.batch),
    "each number of GPUs": lambda run: run.tp,
    "each wiring": lambda run: run.wiring,
    "each model": lambda run: run.model,
}


def raw(sees: Callable[[Run], bool] = lambda run: True, table: Mapping[str, Any] | None = None) -> Points:
    """Of the authors' raw runs."""
    runs = [run for run in timed() if run.wiring != STANDARD and sees(run)]
    measured = {run: speedups(timed()[run.standard], timed()[run]) for run in runs}
    return {run: 100 * (predicted_speedups(run, table) - measured[run]) for run in runs}


def held_out(group: Callable[[Run], Any]) -> Points:
    """The same, each by a fit that saw nothing of its group."""
    off: dict[Run, np.ndarray] = {}
    for key in dict.fromkeys(map(group, raw())):
        table = fit(lambda run, key=key: group(run) != key)
        off |= raw(lambda run, key=key: group(run) == key, table)
    return off


def totals() -> list[float]:
    """Points of the 70B's published speedups, prefill and decoding together."""
    runs = {run: speed for run, speed in published().items() if run.wiring != STANDARD}
    return [100 * (predicted_speedups(run)[2] - speed / published()[run.standard]) for run, speed in runs.items()]


def text_left_out(model: str) -> list[float]:
    """Points of what the paper's text says of a model, by a fit that saw nothing of it."""
    table = fit(lambda run: run.model != model)
    return [100 * (predicted_speedups(run, table)[2] - said) for run, said, _ in TEXT if run.model == model]


def times_that_no_fit_saw() -> dict[Run, float]:
    """Predicted less measured times of the raw runs that have no standard run beside them, as a share.

    Those of other commits than the first used flash attention, by their paths.
    """
    own = {run: logs["40ff2f7"] for run, logs in repeats().items() if run not in timed() and "40ff2f7" in logs}
    return {run: predicted(run).sum() / seconds.sum() - 1 for run, seconds in own.items()}


def noise() -> np.ndarray:
    """The mean difference between speedups of repeats of a run, each over the standard run of the same log's commit."""
    differences = []
    for run, logs in repeats().items():
        standard = repeats().get(run.standard, {})
        fastest = min(seconds.sum() for seconds in logs.values())
        found = [
            speedups(standard[log], seconds)
            for log, seconds in logs.items()
            if run.wiring != STANDARD and log in standard and seconds.sum() < 2 * fastest  # one timed a compilation
        ]
        differences += [100 * abs(one - other) for one, other in combinations(found, 2)]
    return np.mean(differences, axis=0)


def in_range() -> float:
    """The share of raw speedups within what the planner prints as its range, to half a point."""
    inside = []
    for run in raw():
        measured = speedups(timed()[run.standard], timed()[run])[2]
        ends = [predicted_speedups(run, sign=sign)[2] for sign in (-1, 1)]
        inside.append(min(ends) - 0.005 <= measured <= max(ends) + 0.005)
    return float(np.mean(inside))


def by_wiring(off: Points) -> Iterator[tuple[str, np.ndarray]]:
    """A link and a wiring, and all points of it, [runs, 3]."""
    for nvlink, wiring in sorted({(run.nvlink, run.wiring) for run in off}, reverse=True):
        points = [each for run, each in off.items() if (run.nvlink, run.wiring) == (nvlink, wiring)]
        yield f"{'NVLink' if nvlink else 'no P2P'}, {wiring}", np.array(points)


def mean_absolute(points: Any) -> Any:
    return np.mean(np.abs(points), axis=0)


def main() -> None:
    print(f"repeats of a run differ: {_parts(noise())}")
    print(f"within the range: {in_range():.0%} of {len(raw())}")
    _print_wirings("by the whole fit", raw())
    shares = times_that_no_fit_saw().values()
    print(f"times that no fit saw, without standard: {len(shares)} runs, {mean_absolute([*shares]):.1%}")
    for name, group in GROUPS.items():
        _print_wirings(f"{name} left out", held_out(group))
    print(f"published 70B: {mean_absolute(totals()):.1f}")
    for run, said in (*((run, said) for run, said, _ in TEXT), *NOT_FITTED):
        print(f"text on {run}: {said:.2f}, predicted {predicted_speedups(run)[2]:.2f}")
    for model in dict.fromkeys(run.model for run, *_ in TEXT):
        print(f"text on {model} left out: {mean_absolute(text_left_out(model)):.1f}")
    _print_caat()
    for tp in (4, 8):
        said = " to ".join(f"{100 * training_speedup(tp, sequences) - 100:.1f}" for sequences in (4, 1))
        print(f"Ladder's training of the 8B, TP {tp}, 4 sequences to 1: 5 to 7 % published, predicted {said}")


def _print_wirings(name: str, off: Points) -> None:
    for of_what, points in by_wiring(off):
        print(f"{name}: {of_what}, {len(points)} runs: {_parts(mean_absolute(points))}", flush=True)


def _print_caat() -> None:
    print(f"CAAT-Net by gpt-fast on H100: {caat_benchmark.saved_by_gpt_fast():.1f} points of time saved")
    print(f"the same with flash attention: {caat_benchmark.saved_by_gpt_fast(score_passes=0.0):.1f}")
    for model, tp in dict.fromkeys((run.model, run.tp) for run in caat_benchmark.published()):
        off = mean_absolute(caat_benchmark.points(model, tp))
        print(f"CAAT-Net, {model} at TP {tp}: {off:.2f} points of time saved")
    trainings = np.array([(tp, predicted - measured) for tp, _, measured, predicted in caat_benchmark.trainings()])
    print(f"CAAT-Net's training: {mean_absolute(trainings[:, 1]):.1f} points of time saved")
    for tp in np.unique(trainings[:, 0]):
        off = trainings[trainings[:, 0] == tp, 1]
        print(f"  at TP {tp:.0f}: {mean_absolute(off):.1f}, on average {np.mean(off):+.1f}")


def _parts(points: np.ndarray) -> str:
    return "prefill {:.1f}, decoding {:.1f}, both {:.1f}".format(*points)


if __name__ == "__main__":
    main()
