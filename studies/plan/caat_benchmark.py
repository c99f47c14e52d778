"""CAAT-Net's benchmark: times to first token on Gaudi 3 as its authors measured them, and the same runs predicted.

Fitted are three parameters, on the 70B's runs alone; 34B and 7B are held out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from .ladder_benchmark import Run, fitted, rows_of

NAME = "caat-benchmark"
PROMPT = 2048
WIRINGS = (STANDARD, "partial-0.75", "partial-0.5", "partial-0.25", NONE)
FITTED = "llama-2-70b"
_PRIORS = {"flops_share": 0.4, "ring_base": 20e-6, "ring_share": 0.85}


@dataclass(frozen=True)
class PublishedTime:
    model: str
    tp: int
    batch: int
    wiring: str  # one of WIRINGS
    seconds: float
    saved: float  # the share of standard's time: the paper's speedup


@cache
def published() -> list[PublishedTime]:
    measured = []
    for row in rows_of("caat-ttft.csv"):
        for wiring in WIRINGS:
            seconds, standard = float(row[wiring]) * 1e-3, float(row[STANDARD]) * 1e-3
            tp, batch = int(row["tp"]), int(row["batch"])
            measured.append(PublishedTime(row["model"], tp, batch, wiring, seconds, 1 - seconds / standard))
    return measured


def predicted_seconds(run: PublishedTime, table: Mapping[str, Any] | None = None, wiring: str | None = None) -> float:
    """Of its time to first token; of another wiring in its place, if one is given."""
    rank, all_reduce = machine_of(run.model, run.tp, table)
    name, step = wiring or run.wiring, Step(run.batch, PROMPT, PROMPT)
    return pass_time(rank, all_reduce, wiring_of(rank.shape, name), step, name != NONE).seconds


def machine_of(model: str, tp: int, table: Mapping[str, Any] | None = None) -> tuple[Rank, AllReduce]:
    engine, sheet = Engine(**(fitted(NAME) if table is None else table)), hardware.load("gaudi3")
    ring = Ring(engine.ring_base, engine.ring_step, sheet.link_bandwidth * engine.ring_share)
    # appendix C: on Gaudi, links between nodes and within them work at once, so 16 take as long as 8
    all_reduce = AllReduce({}, ring, Network(0.0, math.inf), gpus_per_node=16)
    return Rank(named_shapes()[model], sheet, engine, tp), all_reduce


def points(runs: Sequence[PublishedTime]) -> list[float]:
    """Predicted less published share of time saved, in points, of all but standard runs."""
    rewired = [run for run in runs if run.wiring != STANDARD]
    saved = [1 - predicted_seconds(run) / predicted_seconds(run, wiring=STANDARD) for run in rewired]
    return [100 * (share - run.saved) for share, run in zip(saved, rewired, strict=True)]


def saved_by_gpt_fast(**changes: float) -> float:
    """Points of the 7B's time to first token that p 0.25 saves on eight H100s, where its second version says "13 %".

    By the fitted Ladder benchmark, which ran gpt-fast, too, or by that one with `changes`.
    """
    machine = ladder_benchmark.machine_of(
        Run("llama-2-7b", 128, 8, True, STANDARD), {**fitted(ladder_benchmark.NAME), **changes}
    )
    shape, step = named_shapes()["llama-2-7b"], Step(128, PROMPT, PROMPT)
    rank = machine.rank(shape)
    standard, partial = (
        pass_time(rank, machine.all_reduce, wiring_of(shape, name), step).seconds for name in (STANDARD, "partial-0.25")
    )
    return 100 * (1 - partial / standard)


def parameters(values: Mapping[str, float]) -> dict[str, Any]:
    overheads = {"attention_overhead": 5e-6, "mlp_overhead": 5e-6, "slack": 0.0, "network_step": 0.0}
    return {**values, "memory_share": 0.8, **overheads, "hide": 0.0, "slow_hide": 0.0}


def fit() -> dict[str, Any]:
    """The parameters that come nearest to the 70B's times."""
    import numpy as np
    from scipy.optimize import least_squares

    runs = [run for run in published() if run.model == FITTED]

    def residuals(logs: Any) -> list[float]:
        table = parameters({name: math.exp(log) for name, log in zip(_PRIORS, logs, strict=True)})
        return [math.log(predicted_seconds(run, table) / run.seconds) for run in runs]

    logs = least_squares(residuals, np.log(list(_PRIORS.values())), diff_step=1e-3).x
    return parameters({name: math.exp(log) for name, log in zip(_PRIORS, logs, strict=True)})
