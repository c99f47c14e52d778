"""The Ladder paper's benchmark: what its authors measured, and the same runs predicted.

It ran in fp16 with gpt-fast's math attention on keys and values repeated for every query head, a static cache of 1536
positions, an unsharded head over all positions of the prompt, CUDA graphs and NCCL, on H100s; 405B on two nodes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rewired import hardware
from rewired.checkpoint.named_shapes import named_shapes
from rewired.checkpoint.shape import Shape
from rewired.model.presets import STANDARD
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import NONE
from rewired.plan.all_reduce_time import AllReduce
from rewired.plan.compute import Rank, Step
from rewired.plan.engine import Engine
from rewired.plan.machine import Load, Machine, all_reduces, serving_machine
from rewired.plan.training_step import training_step
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

Seconds = np.ndarray  # [2], of a prefill, and of all decoding after it
Speedups = np.ndarray  # [3], over standard: of prefill, decoding and both


@dataclass(frozen=True)
class Run:
    """A model on `tp` GPUs; `nvlink` is False for NCCL_P2P_DISABLE=1."""

    model: str  # a key of MODELS, or of shapes.toml
    batch: int
    tp: int
    nvlink: bool
    wiring: str  # a text, or none

    @property
    def standard(self) -> Run:
        return replace(self, wiring=STANDARD)


@cache
def fitted(name: str) -> Mapping[str, Any]:
    return json.loads((HERE / "benchmarks.json").read_text("utf-8"))[name]


def rows_of(file: str) -> csv.DictReader[str]:
    """Of a CSV file beside this one."""
    text = (HERE / file).read_text("utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


def speedups(standard: Seconds, own: Seconds) -> Speedups:
    return np.array([*standard, standard.sum()]) / [*own, own.sum()]


@cache
def published() -> Mapping[Run, float]:
    """Tokens per second of the 70B's runs that the authors published as data, prefill included."""
    return {
        Run("70b", int(row["batch"]), int(row["tp"]), row["nvlink"] == "yes", wiring): float(row[wiring])
        for row in rows_of("ladder-70b.csv")
        for wiring in (STANDARD, "ladder", "parallel", NONE)
        if row[wiring]
    }


@cache
def repeats() -> Mapping[Run, Mapping[str, Seconds]]:
    """Of each raw run on several GPUs, by the commit that holds its log and the pipeline stages in the log's name."""
    found: dict[Run, dict[str, Seconds]] = {}
    for row in rows_of("ladder-runs.csv"):
        run = Run(row["model"], int(row["batch"]), int(row["tp"]), row["nvlink"] == "yes", row["wiring"])
        if run.tp > 1:
            seconds = np.array([float(row["prefill_seconds"]), float(row["decode_seconds"])])
            found.setdefault(run, {})[row["commit"] + row["pp"]] = seconds
    return found


@cache
def timed() -> Mapping[Run, Seconds]:
    """Of raw runs that have a standard run beside them, the fastest repeat: what disturbs one only makes it slower."""
    fastest = {run: min(logs.values(), key=np.sum) for run, logs in repeats().items()}
    return {run: seconds for run, seconds in fastest.items() if run.standard in fastest}


def predicted(run: Run, parameters: Mapping[str, Any] | None = None, sign: int | None = None) -> Seconds:
    """By the fitted parameters or others; with a `sign`, on a machine on which wirings win less or more."""
    machine = machine_of(run, parameters)
    if sign is not None:
        machine = machine.off_by(sign)
    shape, wiring = _model(run)
    done = machine.generate(shape, wiring, Load(run.batch, PROMPT, NEW), run.wiring != NONE)
    return np.array([done.prefill.seconds, done.seconds - done.prefill.seconds])


def predicted_speedups(run: Run, parameters: Mapping[str, Any] | None = None, sign: int | None = None) -> Speedups:
    return speedups(predicted(run.standard, parameters, sign), predicted(run, parameters, sign))


def machine_of(run: Run, parameters: Mapping[str, Any] | None = None) -> Machine:
    """The authors' machine: by the fitted parameters in benchmarks.json, or by others."""
    table = dict(parameters or fitted(NAME))
    copies, of_one = Copies(**table.pop("without_p2p")), table.pop("of_one")
    engine, sheet = Engine(**table), hardware.load("h100")
    if run.batch == 1:  # torch.compile writes products with one vector itself, and fuses more with them
        overheads = ("attention_overhead", "mlp_overhead", "slack")
        engine = replace(engine, **{name: getattr(engine, name) * of_one for name in overheads})
    all_reduce = all_reduces(sheet, engine, "nccl")
    if not run.nvlink:
        all_reduce = Copied(**vars(all_reduce), copies=copies, hide_of_copies=engine.slow_hide)
    return Machine(sheet, engine, all_reduce, run.tp)


def training_speedup(tp: int, sequences: int) -> float:
    """Of ladder over standard for the 8B with 8,192 tokens on H100s, of which the paper says "5-7%" of 64 of them.

    No fit saw it. Assumed: the TP degree, sums in 16 bits, nothing computed twice, and FSDP's weights hidden.
    """
    machine, step = serving_machine("h100", "nccl", tp), Step(sequences, 8192, 8192)
    rank = machine.rank(named_shapes()["llama-3.1-8b"])
    standard, ladder = (training_seconds(rank, machine.all_reduce, name, step) for name in (STANDARD, "ladder"))
    return standard / ladder


def training_seconds(rank: Rank, all_reduce: AllReduce, wiring: str, step: Step) -> float:
    """Of a step that computes nothing twice and exchanges no weights."""
    took = training_step(rank, all_reduce, wiring_of(rank.shape, wiring), step, wiring != NONE, recomputes=False)
    return took.seconds


@cache
def _model(run: Run) -> tuple[Shape, Wiring]:
    shape = named_shapes()[MODELS.get(run.model, run.model)]
    # 405B on 16 GPUs: each holds a key-value head, of which there are 8
    shape = replace(shape, num_key_value_heads=max(shape.num_key_value_heads, run.tp))
    return shape, wiring_of(shape, run.wiring)
