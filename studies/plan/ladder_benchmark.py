"""The Ladder paper's benchmark: what its authors measured, and the same runs predicted.

It ran in fp16 with gpt-fast's math attention on keys and values repeated for every query head, a static cache of 1536
positions, an unsharded head over all positions of the prompt, CUDA graphs and NCCL, on H100s; 405B on two nodes.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rewired import hardware
from rewired.checkpoint.named_shapes import named_shapes
from rewired.checkpoint.shape import Shape
from rewired.model.presets import STANDARD
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import NONE
from rewired.plan.engine import Engine
from rewired.plan.machine import Load, Machine, all_reduces
from rewired.plan.wirings import wiring_of

from .copies import Copied, Copies

HERE = Path(__file__).parent
NAME = "ladder-benchmark"
PROMPT, NEW = 1024, 512
MODELS = {
    "405b": "llama-3.1-405b",
    "70b": "llama-3.1-70b",
    "8b": "llama-3.1-8b",
    "3b": "llama-3.2-3b",
    "1b": "llama-3.2-1b",
}
WIRINGS = (STANDARD, "ladder", "parallel", NONE)

Seconds = tuple[float, float]  # of a prefill, and of all decoding after it
Speedups = tuple[float, float, float]  # over standard: of prefill, decoding and both


@dataclass(frozen=True)
class Run:
    """A model on `tp` GPUs; `nvlink` is False for NCCL_P2P_DISABLE=1."""

    model: str  # a key of MODELS, or of shapes.toml
    batch: int
    tp: int
    nvlink: bool
    wiring: str  # a text, or none


@dataclass(frozen=True)
class PublishedSpeed:
    run: Run
    tokens_per_second: float
    speedup: float  # over standard


@cache
def fitted(name: str) -> Mapping[str, Any]:
    return tomllib.loads((HERE / "benchmarks.toml").read_text("utf-8"))[name]


def rows_of(file: str) -> csv.DictReader[str]:
    """Of a CSV file beside this one."""
    text = (HERE / file).read_text("utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


@cache
def published() -> list[PublishedSpeed]:
    """All of the 70B's runs that the authors published as data, `standard` among them."""
    measured = []
    for row in rows_of("ladder-70b.csv"):
        for wiring in WIRINGS:
            if row[wiring]:
                run = Run("70b", int(row["batch"]), int(row["tp"]), row["nvlink"] == "yes", wiring)
                measured.append(PublishedSpeed(run, float(row[wiring]), float(row[wiring]) / float(row[STANDARD])))
    return measured


@dataclass(frozen=True)
class Timed:
    """A run's seconds, of its fastest repeat: what disturbs one only makes it slower."""

    run: Run
    prefill: float
    decode: float  # of all new tokens
    speedups: Speedups


@cache
def timed() -> list[Timed]:
    """The authors' raw runs on several GPUs, all wirings that have a standard run beside them."""
    fastest = {run: min(seconds.values(), key=sum) for run, seconds in repeats().items()}
    return [
        Timed(run, *seconds, speedups(standard, seconds))
        for run, seconds in fastest.items()
        if (standard := fastest.get(standard_of(run)))
    ]


@cache
def repeats() -> Mapping[Run, Mapping[str, Seconds]]:
    """Of each raw run on several GPUs, by the commit that holds its log and the pipeline stages in the log's name."""
    found: dict[Run, dict[str, Seconds]] = {}
    for row in rows_of("ladder-runs.csv"):
        run = Run(row["model"], int(row["batch"]), int(row["tp"]), row["nvlink"] == "yes", row["wiring"])
        if run.tp > 1:
            log = row["commit"] + row["pp"]
            found.setdefault(run, {})[log] = float(row["prefill_seconds"]), float(row["decode_seconds"])
    return found


def standard_of(run: Run) -> Run:
    return replace(run, wiring=STANDARD)


def speedups(standard: Seconds, own: Seconds) -> Speedups:
    return standard[0] / own[0], standard[1] / own[1], sum(standard) / sum(own)


def predicted(run: Run, parameters: Mapping[str, Any] | None = None) -> Seconds:
    return predicted_on(machine_of(run, parameters), run)


def predicted_on(machine: Machine, run: Run) -> Seconds:
    shape, wiring = _model(run)
    done = machine.generate(shape, wiring, Load(run.batch, PROMPT, NEW), run.wiring != NONE)
    return done.prefill.seconds, done.seconds - done.prefill.seconds


def predicted_speedups(run: Run, parameters: Mapping[str, Any] | None = None) -> Speedups:
    return speedups(predicted(standard_of(run), parameters), predicted(run, parameters))


def predicted_speedup(run: Run, parameters: Mapping[str, Any] | None = None) -> float:
    """Of prefill and decoding together."""
    return predicted_speedups(run, parameters)[2]


def machine_of(run: Run, parameters: Mapping[str, Any] | None = None) -> Machine:
    """The authors' machine: by the fitted parameters in benchmarks.toml, or by others."""
    table = dict(fitted(NAME) if parameters is None else parameters)
    copies, of_one = Copies(**table.pop("without_p2p")), table.pop("of_one")
    engine, sheet = Engine(**table), hardware.load("h100")
    if run.batch == 1:  # torch.compile writes products with one vector itself, and fuses more with them
        engine = replace(
            engine,
            attention_overhead=engine.attention_overhead * of_one,
            mlp_overhead=engine.mlp_overhead * of_one,
            slack=engine.slack * of_one,
        )
    all_reduce = all_reduces(sheet, engine, "nccl")
    if not run.nvlink:
        all_reduce = Copied(**vars(all_reduce), copies=copies, hide_of_copies=engine.slow_hide)
    return Machine(sheet, engine, all_reduce, run.tp)


@cache
def _model(run: Run) -> tuple[Shape, Wiring]:
    shape = named_shapes()[MODELS.get(run.model, run.model)]
    # 405B on 16 GPUs: each holds a key-value head, of which there are 8
    shape = replace(shape, num_key_value_heads=max(shape.num_key_value_heads, run.tp))
    return shape, wiring_of(shape, run.wiring)
