"""AxoNN's four overlaps over a slow link between two nodes: a training step with each, and without it.

    sudo .venv/bin/python benchmarks/bench_axonn.py

The setting of bench_comm.py. Each overlap is on and off on copies of one model in the same ranks, which take turns; the
one of tensor parallelism on two ranks, which are two nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bench_comm import (
    RANKS,
    RANKS_PER_NODE,
    ROWS,
    SIZES,
    TOKENS,
    VOCABULARY,
    OnNodes,
    sharded_modules,
    step,
    trained,
)
from page import parser, show
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from turns import Seconds, faster, in_turns

import rewired  # noqa: F401 - registers the classes
from rewired.bench.link import EmulatedLink
from rewired.comm.communication import Communication, gather_ahead
from rewired.comm.late_gradients import late_linears
from rewired.comm.nodes import Nodes
from rewired.comm.options import PRESETS
from rewired.model.modeling_rewired_llama import RewiredLlamaConfig, RewiredLlamaForCausalLM
from rewired.ranks import run_on_ranks
from rewired.tables import markdown

CHECKPOINTED = "with activation checkpointing"
Pair = tuple[str, str]  # the names of two steps: without an overlap, and with it
ROWS_OF_TABLE: dict[tuple[str, str], Pair] = {
    ("OAG", "FSDP2"): ("FSDP2", "FSDP2, gathers ahead"),
    ("OAG", "slow-link"): ("slow-link, no gathers ahead", "slow-link"),
    ("ORS", "slow-link"): ("slow-link, reduced at once", "slow-link"),
    ("OAG and ORS", "slow-link"): ("slow-link, neither", "slow-link"),
    ("cached gathers", f"FSDP2 {CHECKPOINTED}"): ("FSDP2, checkpointed", "FSDP2, cached"),
    ("cached gathers", f"slow-link {CHECKPOINTED}"): ("slow-link, checkpointed", "slow-link, cached"),
    ("OAR", "tensor parallelism of 2"): ("gradients at once", "late gradients"),
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--link", default="300mbit", help="What a node may send, as `rewired bench --link` has it.")
    made.add_argument("--rounds", type=int, default=6)
    made.add_argument("--rows", default="", help="A regular expression of the table's rows, such as 'OAG FSDP2'.")
    args = made.parse_args()
    rows = {row: pair for row, pair in ROWS_OF_TABLE.items() if re.search(args.rows, " ".join(row))}
    steps = {name for pair in rows.values() for name in pair}
    with EmulatedLink.parse(args.link).between(RANKS // RANKS_PER_NODE) as network, TemporaryDirectory() as folder:
        save_standard(Path(folder))
        sharded = run_on_ranks(measure_sharded, RANKS, steps, args.rounds, prepare=OnNodes(network).enter)
        parallel = run_on_ranks(measure_parallel, 2, folder, steps, args.rounds, prepare=OnNodes(network, 1).enter)
    seconds = sharded[0] | parallel[0]
    cells = [
        [*row, *(f"{median(seconds[name]):.2f}" for name in pair), faster(*(seconds[name] for name in pair))]
        for row, pair in rows.items()
    ]
    show(markdown(["overlap", "in", "seconds without", "with", "faster (quartiles)"], cells), "torch")


def measure_sharded(names: set[str], rounds: int) -> Seconds:
    nodes = Nodes.of(RANKS_PER_NODE, "cpu")
    steps: dict[str, Callable[[], partial[None]]] = {
        "FSDP2": plain,
        "FSDP2, gathers ahead": partial(plain, ahead=True),
        "FSDP2, checkpointed": lambda: checkpointed(plain()),
        "FSDP2, cached": lambda: checkpointed(plain(), cached=True),
        "slow-link": partial(with_comm, nodes),
        "slow-link, no gathers ahead": partial(with_comm, nodes, ahead=False),
        "slow-link, reduced at once": partial(with_comm, nodes, late=False),
        "slow-link, neither": partial(with_comm, nodes, ahead=False, late=False),
        "slow-link, checkpointed": lambda: checkpointed(with_comm(nodes)),
        "slow-link, cached": lambda: checkpointed(with_comm(nodes), cached=True),
    }
    return in_turns({name: make() for name, make in steps.items() if name in names}, rounds)


def plain(ahead: bool = False) -> partial[None]:
    model, optimizer = trained()
    if ahead:
        gather_ahead(sharded_modules(model))
    return partial(step, model, optimizer)


def with_comm(nodes: Nodes, ahead: bool = True, late: bool = True) -> partial[None]:
    model, optimizer = trained()
    communication = Communication(model, PRESETS["slow-link"], nodes)
    communication.follow(optimizer)
    if not ahead:
        model._set_unshard_async_op(False)
        for module in sharded_modules(model):
            module.set_modules_to_forward_prefetch([])
    if not late:
        for scatter in communication.gradients.values():
            scatter.read_at_once = lambda _: True
    return partial(step, model, optimizer)


def checkpointed(run: partial[None], cached: bool = False) -> partial[None]:
    """The same with activation checkpointing; `cached`: layers stay gathered from their first forward on."""
    model: Any = run.args[0]
    model.activation_checkpointing_enable()
    model.train()
    for layer in model.model.layers if cached else ():
        layer.set_reshard_after_forward(False)
    return run


def save_standard(folder: Path) -> None:
    torch.manual_seed(0)
    config = RewiredLlamaConfig(wiring=[], tp_shards=2, vocab_size=VOCABULARY, tie_word_embeddings=False, **SIZES)
    RewiredLlamaForCausalLM(config).save_pretrained(folder)


def measure_parallel(folder: str, names: set[str], rounds: int) -> Seconds:
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).train()
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))

    def backward(stand_ins: Callable[..., Mapping[str, Any]]) -> None:
        for layer in model.base.decoder_layers:
            layer.stand_ins = stand_ins
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    steps = {"gradients at once": partial(backward, lambda *_: {}), "late gradients": partial(backward, late_linears)}
    return in_turns({name: run for name, run in steps.items() if name in names}, rounds)


if __name__ == "__main__":
    main()
