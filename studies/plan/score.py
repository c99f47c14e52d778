"""How far off predicted speedups are: `python -m studies.plan.score`, by fits that left runs out, too.

It takes a minute; --rows prints every run. Speedups are ratios, and a point is a hundredth: from 1.31 to 1.33 are two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rewired.model.presets import STANDARD

from . import caat_benchmark, training_benchmarks
from .fit import TEXT, fit
from .ladder_benchmark import (
    Run,
    Timed,
    machine_of,
    predicted,
    predicted_on,
    predicted_speedup,
    predicted_speedups,
    published,
    repeats,
    speedups,
    standard_of,
    timed,
)

PARTS = ("prefill", "decoding", "both")
Points = tuple[float, ...]  # of each part
Group = Callable[[Run], Any]
NOT_FITTED = (  # "around 30%" and "around 40%" of batches of 64; of which model it does not say
    *((Run(model, 64, 8, True, "desync-4x"), 1.30) for model in ("8b", "3b")),
    *((Run(model, 64, 8, False, "desync-4x"), 1.40) for model in ("8b", "3b")),
)
GROUPS: Mapping[str, Group] = {
    "each (GPUs, batch)": lambda run: (run.tp, run.batch),
    "each number of GPUs": lambda run: run.tp,
    "each wiring": lambda run: run.wiring,
    "each model": lambda run: run.model,
}


@dataclass(frozen=True)
class Off:
    """Predicted less measured speedups of a run, in points."""

    run: Run
    points: Points


def raw() -> list[Off]:
    """Of the authors' raw runs, in the parts of PARTS."""
    return [_off(each) for each in timed() if each.run.wiring != STANDARD]


def held_out(group: Group) -> list[Off]:
    """The same, each by a fit that saw nothing of its group."""
    rows = [each for each in timed() if each.run.wiring != STANDARD]
    off = []
    for key in dict.fromkeys(group(each.run) for each in rows):
        table = fit(lambda run, key=key: group(run) != key)  # type: ignore[misc]
        off += [_off(each, table) for each in rows if group(each.run) == key]
    return off


def totals() -> list[Off]:
    """Of the 70B's published speedups, prefill and decoding together."""
    rows = [row for row in published() if row.run.wiring != STANDARD]
    return [Off(row.run, (100 * (predicted_speedup(row.run) - row.speedup),)) for row in rows]


def said_left_out(model: str) -> list[Off]:
    """Of what the paper's text says of a model, by a fit that saw nothing of it."""
    table = fit(lambda run: run.model != model)
    return [Off(run, (100 * (predicted_speedup(run, table) - said),)) for run, said, _ in TEXT if run.model == model]


def times_that_no_fit_saw() -> dict[Run, float]:
    """Predicted less measured times of the raw runs that have no standard run beside them, as a share.

    Those of other commits than the first used flash attention, by their paths.
    """
    compared = {each.run for each in timed()}
    own = {run: sum(logs["40ff2f7"]) for run, logs in repeats().items() if run not in compared and "40ff2f7" in logs}
    return {run: sum(predicted(run)) / seconds - 1 for run, seconds in own.items()}


def noise() -> Points:
    """The mean difference between speedups of repeats of a run, each over the standard run of the same log's commit."""
    differences = []
    for run, logs in repeats().items():
        standard = repeats().get(standard_of(run), {})
        fastest = min(map(sum, logs.values()))
        found = [
            speedups(standard[log], seconds)
            for log, seconds in logs.items()
            if run.wiring != STANDARD and log in standard and sum(seconds) < 2 * fastest  # one log timed a compilation
        ]
        for one, other in combinations(found, 2):
            differences.append([100 * abs(a - b) for a, b in zip(one, other, strict=True)])
    return mean(differences)


def in_range() -> float:
    """The share of raw speedups within what the planner prints as its range."""
    inside = [each for each in timed() if each.run.wiring != STANDARD and _is_in_range(each)]
    return len(inside) / len(raw())


def mean(rows: Sequence[Sequence[float]]) -> Points:
    return tuple(sum(part) / len(part) for part in zip(*rows, strict=True))


def mean_absolute(rows: Sequence[Off]) -> Points:
    return mean([[abs(point) for point in off.points] for off in rows])


def by_link_and_wiring(rows: Sequence[Off]) -> dict[tuple[bool, str], list[Off]]:
    found: dict[tuple[bool, str], list[Off]] = {}
    for off in rows:
        found.setdefault((off.run.nvlink, off.run.wiring), []).append(off)
    return dict(sorted(found.items(), reverse=True))


def _off(each: Timed, table: Mapping[str, Any] | None = None) -> Off:
    pairs = zip(predicted_speedups(each.run, table), each.speedups, strict=True)
    return Off(each.run, tuple(100 * (one - other) for one, other in pairs))


def _is_in_range(each: Timed) -> bool:
    """To half a point."""
    ends = [
        speedups(*(predicted_on(machine_of(each.run).off_by(sign), run) for run in (standard_of(each.run), each.run)))
        for sign in (-1, 1)
    ]
    return min(ends)[2] - 0.005 <= each.speedups[2] <= max(ends)[2] + 0.005


def _lines() -> Iterator[str]:
    yield f"repeats of a run differ: {_parts(noise())}"
    yield f"within the range: {in_range():.0%} of {len(raw())}"
    yield from _by_wiring("by the whole fit", raw())
    shares = times_that_no_fit_saw().values()
    yield f"times that no fit saw, without standard: {len(shares)} runs, {sum(map(abs, shares)) / len(shares):.1%}"
    for name, group in GROUPS.items():
        off = held_out(group)
        yield from _by_wiring(f"{name} left out", off)
        if "--rows" in sys.argv[1:]:
            yield from (f"  {each.run}: {_parts(each.points)}" for each in off)
    yield f"CAAT-Net by gpt-fast on H100: {caat_benchmark.saved_by_gpt_fast():.1f} points of time saved"
    yield f"the same with flash attention: {caat_benchmark.saved_by_gpt_fast(score_passes=0.0):.1f}"
    yield f"published 70B: {_parts(mean_absolute(totals()))}"
    for run, said in (*((run, said) for run, said, _ in TEXT), *NOT_FITTED):
        yield f"text on {run}: {said:.2f}, predicted {predicted_speedup(run):.2f}"
    for model in dict.fromkeys(run.model for run, *_ in TEXT):
        yield f"text on {model} left out: {_parts(mean_absolute(said_left_out(model)))}"
    runs = caat_benchmark.published()
    for model, tp in dict.fromkeys((run.model, run.tp) for run in runs):
        off = caat_benchmark.points([run for run in runs if (run.model, run.tp) == (model, tp)])
        yield f"CAAT-Net, {model} at TP {tp}: {sum(map(abs, off)) / len(off):.2f} points of time saved"

    trainings: dict[int, list[float]] = {}
    for tp, wiring, measured, points in training_benchmarks.caat_points():
        yield f"CAAT-Net's training, TP {tp}, {wiring}: {measured:.1f} points saved, predicted {points:.1f}"
        trainings.setdefault(tp, []).append(abs(points - measured))
    means = {tp: sum(off) / len(off) for tp, off in trainings.items()}
    by_tp = ", ".join(f"TP {tp} {mean:.1f}" for tp, mean in means.items())
    yield f"CAAT-Net's training: {sum(means.values()) / len(means):.1f} points; {by_tp}"
    for tp in (4, 8):
        said = " to ".join(f"{100 * training_benchmarks.ladder_speedup(tp, each) - 100:.1f}" for each in (4, 1))
        yield f"Ladder's training of the 8B, TP {tp}, 4 sequences to 1: 5 to 7 % published, predicted {said}"


def _by_wiring(name: str, rows: Sequence[Off]) -> Iterator[str]:
    for (nvlink, wiring), off in by_link_and_wiring(rows).items():
        where = "NVLink" if nvlink else "no P2P"
        bias = mean([each.points for each in off])[-1]
        yield f"{name}: {where}, {wiring}, {len(off)} runs: {_parts(mean_absolute(off))} (bias {bias:+.1f})"


def _parts(points: Points) -> str:
    names = PARTS if len(points) == len(PARTS) else PARTS[-1:]
    return ", ".join(f"{name} {point:.1f}" for name, point in zip(names, points, strict=True))


if __name__ == "__main__":
    for line in _lines():
        print(line, flush=True)
