"""A training step on every grid of 8 ranks in two nodes with a slow link, and the order that `plan --goal train` gives.

    sudo .venv/bin/python benchmarks/bench_grid.py --link 200mbit

The ranks run in two network namespaces, which are the nodes; what one sends the other passes a token bucket. All grids
take turns in the same ranks, on one small Llama: forward, recomputed in backward as plan has it, and SGD. A time is the
slowest rank's.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import correlation, median
from typing import Any

import torch
from bench_comm import OnNodes
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from turns import Seconds, in_turns

from rewired import hardware
from rewired.bench.link import EmulatedLink
from rewired.checkpoint.shape import Shape
from rewired.grid.parallel import tp_plan
from rewired.grid.size import TpSize
from rewired.model.modeling_rewired_llama import RewiredLlamaConfig, RewiredLlamaForCausalLM
from rewired.plan.grids import Grid, plan_grids
from rewired.ranks import run_on_ranks
from rewired.tables import markdown

NODES, RANKS_PER_NODE = 2, 4
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
BATCH, TOKENS = 8, 128
NUMBERS = 2**20  # of the all-reduce that measures a node's own bandwidth
WITHIN = "within a node"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--link", default="200mbit", help="What a node may send, as `rewired bench --link` has it.")
    made.add_argument("--rounds", type=int, default=3)
    args = made.parse_args()
    link, config = EmulatedLink.parse(args.link), RewiredLlamaConfig(**SIZES, wiring=[], tp_shards=1)
    shape = Shape.from_config(config.to_dict())
    with tempfile.TemporaryDirectory() as folder, link.between(NODES) as network:
        torch.manual_seed(0)
        RewiredLlamaForCausalLM(config).save_pretrained(folder)
        ranks, enter = NODES * RANKS_PER_NODE, OnNodes(network, RANKS_PER_NODE).enter
        grids = planned(shape, link, within=1e9)  # in whatever order
        seconds: Seconds = run_on_ranks(measure, ranks, Path(folder), grids, args.rounds, prepare=enter)[0]
    within = 2 * (1 - 1 / RANKS_PER_NODE) * 4 * NUMBERS / median(seconds.pop(WITHIN))
    print(f"`{shlex.join(['python', *sys.argv])}`, torch {torch.__version__}.\n")
    print(f"Within a node, ranks all-reduce at {within / 1e6:.0f} MB/s; a node sends {args.link}.\n")
    print(table(planned(shape, link, within), seconds))


def planned(shape: Shape, link: EmulatedLink, within: float) -> list[Grid]:
    """Every grid, the best first. What else the sheet says is the same for all of them, and changes no order."""
    sheet = replace(
        hardware.load("h100"), link_bandwidth=within, network_bandwidth=link.bits_per_second / 8 / RANKS_PER_NODE
    )
    return plan_grids(shape, sheet, NODES, RANKS_PER_NODE, BATCH, TOKENS).grids


def table(grids: list[Grid], seconds: Seconds) -> str:
    """The grids as plan ranks them, beside the seconds that their steps took, and how well the orders agree."""
    predicted = [grid.communication for grid in grids]
    steps = [median(seconds[name_of(grid)]) for grid in grids]
    cells = [
        [name_of(grid), f"{2 * said:.2f}", f"{took:.2f}", str(place)]  # plan counts 16-bit numbers, these are 32
        for grid, said, took, place in zip(grids, predicted, steps, places(steps), strict=True)
    ]
    rho = correlation(places(predicted), places(steps))
    head = ["tp x fsdp x replicas", "plan: seconds of communication", "seconds of a step", "place"]
    return f"{markdown(head, cells)}\n\nSpearman's rank correlation: {rho:.2f}."


def places(values: list[float]) -> list[int]:
    """1 for the smallest."""
    order = sorted(values)
    return [1 + order.index(value) for value in values]


def name_of(grid: Grid) -> str:
    return f"{grid.tp_size} x {grid.fsdp} x {grid.replicate}"


def measure(folder: Path, grids: list[Grid], rounds: int) -> Seconds:
    numbers = torch.ones(NUMBERS)
    for node in range(NODES):
        group = distributed.new_group([node * RANKS_PER_NODE + rank for rank in range(RANKS_PER_NODE)])
        if distributed.get_rank() // RANKS_PER_NODE == node:
            within = partial(distributed.all_reduce, numbers, group=group)
    return in_turns({WITHIN: within} | {name_of(grid): step_of(folder, grid) for grid in grids}, rounds)


def step_of(folder: Path, grid: Grid) -> Callable[[], None]:
    plan = tp_plan(AutoConfig.from_pretrained(folder), TpSize.parse(grid.tp_size))
    sizes = DistributedConfig(tp_size=grid.tp, fsdp_size=grid.fsdp, dp_replicate_size=grid.replicate, tp_plan=plan)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sizes).train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ids = torch.randint(SIZES["vocab_size"], (BATCH // (grid.fsdp * grid.replicate), TOKENS))
    return partial(step, model, optimizer, ids)


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
