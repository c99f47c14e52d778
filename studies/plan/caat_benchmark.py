"""CAAT-Net's benchmarks on Gaudi 3: times to first token and trainings as its authors measured them, and predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rewired import hardware
from rewired.checkpoint.named_shapes import named_shapes
from rewired.model.presets import STANDARD
from rewired.model.wiring_text import NONE
from rewired.plan.all_reduce_time import AllReduce, Network, Ring
from rewired.plan.compute import Rank, Step
from rewired.plan.engine import Engine
from rewired.plan.pass_time import pass_time
from rewired.plan.wirings import wiring_of

from . import ladder_benchmark
from .ladder_benchmark import Run, fitted, rows_of, training_seconds

NAME = "caat-benchmark"
PREFILL = 2048
PARTIAL = ("partial-0.75", "partial-0.5", "partial-0.25", NONE)


@dataclass(frozen=True)
class PublishedTime:
    model: str
    tp: int
    batch: int
    wiring: str  # standard, or one of PARTIAL
    seconds: float
    saved: float  # the share of standard's time: the paper's speedup


@cache
def published() -> list[PublishedTime]:
    return [
        PublishedTime(
            row["model"],
            int(row["tp"]),
            int(row["batch"]),
            wiring,
            float(row[wiring]) * 1e-3,
            1 - float(row[wiring]) / float(row[STANDARD]),
        )
        for row in rows_of("caat-ttft.csv")
        for wiring in (STANDARD, *PARTIAL)
    ]


def predicted_seconds(run: PublishedTime, table: Mapping[str, Any] | None = None) -> float:
    """Of its time to first token."""
    return _prefill(*machine_of(run.model, run.tp, table), run.batch, run.wiring)


def _prefill(rank: Rank, all_reduce: AllReduce, batch: int, wiring: str) -> float:
    step = Step(batch, PREFILL, PREFILL)
    return pass_time(rank, all_reduce, wiring_of(rank.shape, wiring), step, wiring != NONE).seconds


def machine_of(model: str, tp: int, table: Mapping[str, Any] | None = None) -> tuple[Rank, AllReduce]:
    engine, sheet = Engine(**(table or fitted(NAME))), hardware.load("gaudi3")
    ring = Ring(engine.ring_base, engine.ring_step, sheet.link_bandwidth * engine.ring_share)
    # appendix C: on Gaudi, links between nodes and within them work at once, so 16 take as long as 8
    all_reduce = AllReduce({}, ring, Network(0.0, math.inf), gpus_per_node=16)
    return Rank(named_shapes()[model], sheet, engine, tp), all_reduce


def points(model: str, tp: int) -> list[float]:
    """Predicted less published share of time saved, in points, of all runs of `model` on so many ranks."""
    runs = [run for run in published() if (run.model, run.tp) == (model, tp) and run.wiring != STANDARD]
    saved = [1 - predicted_seconds(run) / predicted_seconds(replace(run, wiring=STANDARD)) for run in runs]
    return [100 * (share - run.saved) for share, run in zip(saved, runs, strict=True)]


def saved_by_gpt_fast(**changes: float) -> float:
    """Points of the 7B's time to first token that p 0.25 saves on eight H100s, where its second version says "13 %".

    By the fitted Ladder benchmark, which ran gpt-fast, too, or by that one with `changes`.
    """
    table = {**fitted(ladder_benchmark.NAME), **changes}
    machine = ladder_benchmark.machine_of(Run("llama-2-7b", 128, 8, True, STANDARD), table)
    rank = machine.rank(named_shapes()["llama-2-7b"])
    standard, partial = (_prefill(rank, machine.all_reduce, 128, name) for name in (STANDARD, "partial-0.25"))
    return 100 * (1 - partial / standard)


def trainings() -> Iterator[tuple[int, str, float, float]]:
    """TP, wiring, and the share of the 7B's step that is saved, published and predicted, in points.

    No fit saw them. Assumed: 16 sequences of 4,096 tokens, nothing computed twice, and all-reduces that take no
    processors, since Gaudi's network has its own.
    """
    for row in rows_of("caat-training.csv"):
        tp, dense = int(row["tp"]), float(row[STANDARD])
        rank, all_reduce = machine_of("llama-2-7b", tp)
        all_reduce = replace(all_reduce, hide=1.0)
        step = Step(16, 4096, 4096)
        standard, *others = (training_seconds(rank, all_reduce, name, step) for name in (STANDARD, *PARTIAL))
        for wiring, seconds in zip(PARTIAL, others, strict=True):
            yield tp, wiring, 100 * (1 - dense / float(row[wiring])), 100 * (1 - seconds / standard)
