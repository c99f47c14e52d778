"""The Ladder paper's benchmark: what its authors measured, and the same runs predicted.

It ran in fp16 with gpt-fast's math attention on keys and values repeated for every query head, a static cache of 1536
positions, an unsharded head over all positions of the prompt, CUDA graphs and NCCL, on H100s; 405B on two nodes.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rewired.checkpoint.named_shapes import named_shapes
from rewired.checkpoint.shape import Shape
from rewired.model.presets import STANDARD
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import NONE
from rewired.plan import hardware
from rewired.plan.all_reduce_time import AllReduce, Ring
from rewired.plan.engine import Engine
from rewired.plan.machine import Load, Machine, all_reduces
from rewired.plan.wirings import wiring_of

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


@dataclass(frozen=True)
class Copies:
    """NCCL without peer-to-peer access (NCCL_P2P_DISABLE=1): small messages are copied through the host's memory.

    Large ones are still reduced by the NVLink switches (NVLS), which this does not turn off. By the raw runs, so it is
    for four GPUs and not for two, whose messages of 17 MB take 1.1 ms (15 GB/s): not fitted yet.
    """

    near: Ring  # up to four GPUs, which hang on one processor
    far: Ring
    up_to_here: float  # bytes of a message that is copied, on one node
    up_to_across: float  # and between nodes
    nvls_slack: float  # seconds that a larger one takes longer than with peer-to-peer access

    def ring(self, gpus: int) -> Ring:
        return self.near if gpus <= 4 else self.far

    def up_to(self, nodes: int) -> float:
        return self.up_to_here if nodes == 1 else self.up_to_across


@dataclass(frozen=True)
class Copied(AllReduce):
    """All-reduces without peer-to-peer access."""

    copies: Copies = field(kw_only=True)

    def within_node(self, size: float, gpus: int) -> float:
        if size > self.copies.up_to(math.ceil(gpus / self.gpus_per_node)):
            return super().within_node(size, gpus) + self.copies.nvls_slack
        return self.copies.ring(gpus).at(size, min(gpus, self.gpus_per_node))


@cache
def published() -> list[PublishedSpeed]:
    """All of the 70B's runs that the authors published as data, `standard` among them."""
    text = (HERE / "ladder-70b.csv").read_text("utf-8")
    measured = []
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
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
    speedups: tuple[float, float, float]  # over standard: of prefill, decode and both


@cache
def timed() -> list[Timed]:
    """The authors' raw runs on several GPUs, all wirings that have a standard run beside them."""
    text = (HERE / "ladder-runs.csv").read_text("utf-8")
    repeats: dict[Run, list[tuple[float, float]]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        run = Run(row["model"], int(row["batch"]), int(row["tp"]), row["nvlink"] == "yes", row["wiring"])
        seconds = float(row["prefill_seconds"]), float(row["decode_seconds"])
        if run.tp > 1:
            repeats.setdefault(run, []).append(seconds)
    fastest = {run: min(seconds, key=sum) for run, seconds in repeats.items()}
    return [
        Timed(run, prefill, decode, _over(standard, (prefill, decode)))
        for run, (prefill, decode) in fastest.items()
        if (standard := fastest.get(replace(run, wiring=STANDARD)))
    ]


def _over(standard: tuple[float, ...], own: tuple[float, ...]) -> tuple[float, float, float]:
    prefill, decode = (before / after for before, after in zip(standard, own, strict=True))
    return prefill, decode, sum(standard) / sum(own)


def predicted(run: Run, parameters: Mapping[str, Any] | None = None) -> tuple[float, float]:
    """Seconds of the prefill, and of all decoding after it."""
    (shape, wiring), machine = _model(run), machine_of(run.tp, run.nvlink, parameters)
    done = machine.generate(shape, wiring, Load(run.batch, PROMPT, NEW), run.wiring != NONE)
    return done.prefill.seconds, done.seconds - done.prefill.seconds


def predicted_speedups(run: Run, parameters: Mapping[str, Any] | None = None) -> tuple[float, float, float]:
    return _over(predicted(replace(run, wiring=STANDARD), parameters), predicted(run, parameters))


def predicted_speedup(run: Run, parameters: Mapping[str, Any] | None = None) -> float:
    standard = tokens_per_second(replace(run, wiring=STANDARD), parameters)
    return tokens_per_second(run, parameters) / standard


def tokens_per_second(run: Run, parameters: Mapping[str, Any] | None = None) -> float:
    (shape, wiring), machine = _model(run), machine_of(run.tp, run.nvlink, parameters)
    return machine.generate(shape, wiring, Load(run.batch, PROMPT, NEW), run.wiring != NONE).tokens_per_second


def machine_of(tp: int, nvlink: bool, parameters: Mapping[str, Any] | None = None) -> Machine:
    """The authors' machine: by the fitted parameters in benchmarks.toml, or by others."""
    table = dict(fitted(NAME) if parameters is None else parameters)
    copies = table.pop("without_p2p")
    engine, sheet = Engine(**table), hardware.load("h100")
    all_reduce = all_reduces(sheet, engine, "nccl")
    if not nvlink:
        engine = replace(engine, hide_loss=copies["hide_loss"])
        all_reduce = Copied(**vars(all_reduce), copies=_copies(copies))
    return Machine(sheet, engine, all_reduce, tp)


def _copies(table: Mapping[str, float]) -> Copies:
    base = table["base"]
    return Copies(
        near=Ring(base, table["step"], table["bandwidth"]),
        far=Ring(base, table["far_step"], table["far_bandwidth"]),
        up_to_here=table["up_to_here"],
        up_to_across=table["up_to_across"],
        nvls_slack=table["nvls_slack"],
    )


@cache
def _model(run: Run) -> tuple[Shape, Wiring]:
    shape = named_shapes()[MODELS.get(run.model, run.model)]
    # 405B on 16 GPUs: each holds a key-value head, of which there are 8
    shape = replace(shape, num_key_value_heads=max(shape.num_key_value_heads, run.tp))
    return shape, wiring_of(shape, run.wiring)
