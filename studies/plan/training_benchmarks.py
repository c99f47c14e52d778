"""Published trainings, and the same predicted. No fit saw any of them; what the papers leave open is assumed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rewired.checkpoint.named_shapes import named_shapes
from rewired.model.presets import STANDARD
from rewired.model.wiring_text import NONE
from rewired.plan.all_reduce_time import AllReduce
from rewired.plan.compute import Rank, Step
from rewired.plan.machine import serving_machine
from rewired.plan.training_step import training_step
from rewired.plan.wirings import wiring_of

from . import caat_benchmark
from .ladder_benchmark import rows_of


def caat_points() -> Iterator[tuple[int, str, float, float]]:
    """TP, wiring, and the share of a step that is saved, published and predicted, in points.

    Assumed: 16 sequences of 4,096 tokens, nothing computed twice, and all-reduces that take no processors, since
    Gaudi's network has its own.
    """
    for row in rows_of("caat-training.csv"):
        tp, dense = int(row["tp"]), float(row[STANDARD])
        rank, all_reduce = caat_benchmark.machine_of("llama-2-7b", tp)
        all_reduce = replace(all_reduce, hide=1.0)
        for wiring in caat_benchmark.WIRINGS[1:]:
            times = [_seconds(rank, all_reduce, name, Step(16, 4096, 4096)) for name in (STANDARD, wiring)]
            yield tp, wiring, 100 * (1 - dense / float(row[wiring])), 100 * (1 - times[1] / times[0])


def ladder_speedup(tp: int, sequences: int) -> float:
    """Of ladder over standard for the 8B with 8,192 tokens on H100s, of which the paper says "5-7%" of 64 of them.

    Assumed: the TP degree, sums in 16 bits, nothing computed twice, and FSDP's weights hidden.
    """
    machine, step = serving_machine("h100", "nccl", tp), Step(sequences, 8192, 8192)
    rank = machine.rank(named_shapes()["llama-3.1-8b"])
    standard, ladder = (_seconds(rank, machine.all_reduce, name, step) for name in (STANDARD, "ladder"))
    return standard / ladder


def _seconds(rank: Rank, all_reduce: AllReduce, name: str, step: Step) -> float:
    wiring = wiring_of(rank.shape, name)
    took = training_step(rank, all_reduce, wiring, step, name != NONE, recomputes=False)
    return took.seconds
