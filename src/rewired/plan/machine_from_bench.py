"""The calibration: a machine whose times are scaled to what `rewired bench` measured on it.

Of its results.json count the all-reduces, `none` (no communication) and, where it was run, `ladder`: compiled where
they were, and on the slow link where there is one. A plan is for 16-bit numbers: messages of float32 count as half as
long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rewired.checkpoint.named_shapes import find_shape
from rewired.checkpoint.shape import Shape
from rewired.model.wiring_text import NONE

from .all_reduce_time import Curve
from .compute import Rank, Step
from .machine import Machine
from .pass_time import PassTime, pass_time
from .wirings import wiring_of

_STEPS = 30  # of an approximation


@dataclass(frozen=True)
class _Run:
    shape: Shape
    wiring: str
    tp: int
    batch: int
    prompt: int
    seconds: tuple[float, float]  # of a prefill, and of a token


def calibrated(machine: Machine, file: Path) -> Machine:
    """Raises ValueError for a file that is no results.json, or has no times of `none` or of all-reduces."""
    machine = with_all_reduces(machine, file)
    rows = [row for row in _entries(file, "rows") if "prefill_seconds" in row]  # a training has none
    bounds, ladders = ([_run(row) for row in rows if row["wiring"] == name] for name in (NONE, "ladder"))
    if not bounds:
        raise ValueError(f"{file} has no prefill and decoding of '{NONE}': measure them with rewired bench.")
    return _hide(_scale_compute(machine, bounds), ladders)


def with_all_reduces(machine: Machine, file: Path) -> Machine:
    """With the times of all-reduces that a bench measured. Raises ValueError for a file that has none."""
    width = 0.5 if _report(file)["request"]["dtype"] == "float32" else 1.0
    points: dict[int, dict[float, float]] = {}
    for entry in _entries(file, "all_reduce"):
        points.setdefault(entry["gpus"], {})[width * entry["bytes"]] = entry["seconds"]
    if not points:
        raise ValueError(f"{file} has no times of all-reduces: measure them with rewired bench, on several ranks.")
    curves = {gpus: Curve.through(by_size) for gpus, by_size in points.items()}
    return replace(machine, all_reduce=replace(machine.all_reduce, curves=curves, halves={}))


def _entries(file: Path, name: str) -> list[Mapping[str, Any]]:
    """Those of the link that counts, where several were measured."""
    report = _report(file)
    link = report["link"]
    return [entry for entry in report[name] if link is None or entry["link"] == link]


def _report(file: Path) -> Mapping[str, Any]:
    try:
        report = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{file} is not a JSON file: give a results.json of `rewired bench`.") from None
    if not (isinstance(report, dict) and {"link", "request", "rows", "all_reduce"} <= report.keys()):
        raise ValueError(f"{file} is not a results.json of `rewired bench`.")
    return report


def _run(row: Mapping[str, Any]) -> _Run:
    prefill, decode = (
        row.get(f"{measure}_compiled_seconds", row[f"{measure}_seconds"]) for measure in ("prefill", "decode")
    )
    shape = replace(find_shape(row["model"]), num_hidden_layers=row["layers"])
    return _Run(shape, row["wiring"], row["tp"], row["batch"], row["prompt"], (prefill, decode))


def _scale_compute(machine: Machine, bounds: Sequence[_Run]) -> Machine:
    """By what the engine takes longer without any communication: memory and overheads by decoding, products by prefill.

    A prefill is not of products alone, so their share is found step by step.
    """
    decode = median(run.seconds[1] / _predicted(machine, run)[1].seconds for run in bounds)
    engine = replace(
        machine.engine,
        memory_share=machine.engine.memory_share / decode,
        attention_overhead=machine.engine.attention_overhead * decode,
        mlp_overhead=machine.engine.mlp_overhead * decode,
    )
    for _ in range(_STEPS):
        scaled = replace(machine, engine=engine)
        prefill = median(run.seconds[0] / _predicted(scaled, run)[0].seconds for run in bounds)
        engine = replace(engine, flops_share=min(1.0, engine.flops_share / prefill))
    return replace(machine, engine=engine)


def _hide(machine: Machine, ladders: Sequence[_Run]) -> Machine:
    """The share hidden that comes nearest to ladders' times; of equally near ones, the one nearest to ours."""
    ours = machine.all_reduce.hide

    def hiding(share: float) -> Machine:
        return replace(machine, all_reduce=replace(machine.all_reduce, hide=share))

    def distance(share: float) -> tuple[float, float]:
        passes = [zip(_predicted(hiding(share), run), run.seconds, strict=True) for run in ladders]
        off = [abs(math.log(measured / predicted.seconds)) for each in passes for predicted, measured in each]
        return round(sum(off), 6), abs(share - ours)

    return hiding(min([ours, *(percent / 100 for percent in range(101))], key=distance))


def _predicted(machine: Machine, run: _Run) -> tuple[PassTime, PassTime]:
    """A prefill and a decoding step just after it."""
    rank = Rank(run.shape, machine.hardware, machine.engine, run.tp)
    steps = Step(run.batch, run.prompt, run.prompt), Step(run.batch, 1, run.prompt + 1)
    wiring, communicates = wiring_of(run.shape, run.wiring), run.wiring != NONE
    prefill, decode = (pass_time(rank, machine.all_reduce, wiring, step, communicates) for step in steps)
    return prefill, decode
