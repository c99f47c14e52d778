"""The Ladder paper's benchmark: what its authors measured, and the same runs predicted.

It ran in fp16 with gpt-fast's math attention on keys and values repeated for every query head, a static cache of 1536
positions, an unsharded head over all positions of the prompt, CUDA graphs and NCCL, on H100s; 405B on two nodes.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from rewired.checkpoint.llama import LlamaShape
from rewired.model.wiring import Wiring

from . import hardware
from .collectives import Copies, Ring
from .engine import Engine, engine_table
from .machine import Load, Machine, all_reduces
from .shapes import named_shapes
from .wirings import STANDARD, UPPER, whole

NAME = "ladder-benchmark"
PROMPT, NEW = 1024, 512
MODELS = {
    "405b": "llama-3.1-405b",
    "70b": "llama-3.1-70b",
    "8b": "llama-3.1-8b",
    "3b": "llama-3.2-3b",
    "1b": "llama-3.2-1b",
}
WIRINGS = (STANDARD, "ladder", "parallel", "upper")


@dataclass(frozen=True)
class Run:
    """A model on `tp` GPUs; `nvlink` is False for NCCL_P2P_DISABLE=1."""

    model: str  # a key of MODELS, or of shapes.toml
    batch: int
    tp: int
    nvlink: bool
    wiring: str  # one of WIRINGS, or of the wirings that are compared


@dataclass(frozen=True)
class Measured:
    run: Run
    tokens_per_second: float
    speedup: float  # over standard


@cache
def published() -> list[Measured]:
    """All of the 70B's runs that the authors published as data, `standard` among them."""
    text = (files("rewired.plan") / "ladder-70b.csv").read_text("utf-8")
    measured = []
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        for wiring in WIRINGS:
            if row[wiring]:
                run = Run("70b", int(row["batch"]), int(row["tp"]), row["nvlink"] == "yes", wiring)
                measured.append(Measured(run, float(row[wiring]), float(row[wiring]) / float(row[STANDARD])))
    return measured


def predicted_speedup(run: Run, parameters: Mapping[str, Any] | None = None) -> float:
    standard = tokens_per_second(replace(run, wiring=STANDARD), parameters)
    return tokens_per_second(run, parameters) / standard


def tokens_per_second(run: Run, parameters: Mapping[str, Any] | None = None) -> float:
    shape = _shape(run)
    wiring, communicates = _wiring(shape, run.wiring), run.wiring not in (UPPER, "upper")
    machine = machine_of(run.tp, run.nvlink, parameters)
    return machine.generate(shape, wiring, Load(run.batch, PROMPT, NEW), communicates).tokens_per_second


def machine_of(tp: int, nvlink: bool, parameters: Mapping[str, Any] | None = None) -> Machine:
    """The authors' machine: by the fitted parameters in engines.toml, or by others."""
    table = dict(engine_table()[NAME] if parameters is None else parameters)
    copies = table.pop("without_p2p")
    engine, sheet = Engine(**table), hardware.load("h100")
    all_reduce = all_reduces(sheet, engine, "nccl")
    if not nvlink:
        engine = replace(engine, hide_loss=copies["hide_loss"])
        all_reduce = replace(all_reduce, copies=_copies(copies))
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
def _shape(run: Run) -> LlamaShape:
    shape = named_shapes()[MODELS.get(run.model, run.model)]
    # 405B on 16 GPUs: each holds a key-value head, of which there are 8
    return replace(shape, num_key_value_heads=max(shape.num_key_value_heads, run.tp))


@cache
def _wiring(shape: LlamaShape, name: str) -> Wiring:
    if name == "ladder-last-half":
        return shape.wiring([{"layers": f"{shape.num_hidden_layers // 2}-", "preset": "ladder"}])
    return whole(shape, name)
