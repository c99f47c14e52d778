"""A training step over a slow link between two nodes: `comm` against FSDP2's own collectives.

    sudo .venv/bin/python benchmarks/bench_comm.py --link 150mbit --write

Four ranks in two network namespaces, which are the nodes; what one sends the other passes a token bucket. All ways of
communication take turns in the same ranks, on copies of one small Llama, and so does a step whose collectives stay on
the rank, which is what a step takes without a network. A time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from transformers import LlamaConfig, LlamaForCausalLM

from rewired.bench.link import EmulatedLink, EmulatedNetwork
from rewired.bench.timing import timed
from rewired.comm.communication import Communication
from rewired.comm.nodes import Nodes
from rewired.comm.options import PRESETS, Comm
from rewired.ranks import run_on_ranks

RESULT = Path(__file__).resolve().parents[1] / "results" / "bench-comm.md"
RANKS, RANKS_PER_NODE = 4, 2
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 6}
VOCABULARY, ROWS, TOKENS = 2048, 2, 512
Rounds = list[dict[str, float]]  # of each, the seconds of what was timed in it
PLAIN, ALONE = "FSDP2", "no network"
WAYS: dict[str, Comm | None] = {
    ALONE: None,
    PLAIN: None,
    "bf16": Comm("bf16", "bf16", "bf16", secondary_shard="none", hadamard=False),
    "zero++": PRESETS["zero++"],
    "slow-link": PRESETS["slow-link"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="150mbit", help="What a node may send, as `rewired bench --link` has it.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULT.name}")
    args = parser.parse_args()
    with EmulatedLink.parse(args.link).between(RANKS // RANKS_PER_NODE) as network:
        rounds = slowest(run_on_ranks(measure, RANKS, args.rounds, prepare=OnNodes(network).enter))
    report = _REPORT.format(
        command=shlex.join(["benchmarks/bench_comm.py", *sys.argv[1:]]),
        environment=environment(),
        link=args.link,
        parameters=sum(weight.numel() for weight in llama().parameters()) / 1e6,
        rows=ROWS,
        tokens=TOKENS,
        share=median(1 - one[ALONE] / one[PLAIN] for one in rounds),
        rounds=args.rounds,
        table="\n".join(_row(name, rounds) for name in WAYS),
    )
    print(report)
    if args.write:
        RESULT.write_text(report)


@dataclass(frozen=True)
class OnNodes:
    """Puts each rank into its node's namespace."""

    network: EmulatedNetwork
    ranks_per_node: int = RANKS_PER_NODE

    def enter(self, rank: int) -> None:
        self.network.enter(rank // self.ranks_per_node)


def measure(rounds: int) -> Rounds:
    """Seconds of a step, of all ways in turns."""
    nodes = Nodes.of(RANKS_PER_NODE, "cpu")
    steps = {name: step_of(name, comm, nodes) for name, comm in WAYS.items()}
    return in_turns(steps, rounds)


def in_turns(steps: dict[str, Callable[[], None]], rounds: int) -> Rounds:
    for step in steps.values():
        step()
    order = list(steps)
    return [{name: timed(steps[name]) for name in (order if n % 2 else order[::-1])} for n in range(rounds)]


def slowest(ranks: Sequence[Rounds]) -> Rounds:
    return [{name: max(one[name] for one in of_ranks) for name in of_ranks[0]} for of_ranks in zip(*ranks, strict=True)]


def step_of(name: str, comm: Comm | None, nodes: Nodes) -> Callable[[], None]:
    model, optimizer = trained()
    for module in sharded_modules(model) if name == ALONE else ():
        module.set_custom_all_gather(LocalGather())
        module.set_custom_reduce_scatter(LocalScatter())
    if comm is not None:
        Communication(model, comm, nodes).follow(optimizer)
    return partial(step, model, optimizer)


def trained() -> tuple[Any, torch.optim.Optimizer]:
    model, mesh = llama(), init_device_mesh("cpu", (RANKS,))
    for module in (*model.model.layers, model.model.embed_tokens, model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def sharded_modules(model: Any) -> list[Any]:
    """In the order of execution."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **SIZES))


class _Local:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class LocalGather(_Local, AllGather):
    """All shards are this rank's own."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        output_tensor.copy_(input_tensor.repeat(RANKS))


class LocalScatter(_Local, ReduceScatter):
    """All ranks' gradients are this rank's own."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        output_tensor.copy_(input_tensor.view(RANKS, -1)[distributed.get_rank()])


def environment() -> str:
    return f"{date.today()}; {platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _row(name: str, rounds: Rounds) -> str:
    return f"| {name} | {median(one[name] for one in rounds):.2f} | {faster(PLAIN, name, rounds)} |"


def faster(base: str, other: str, rounds: Rounds) -> str:
    """The median of the rounds' ratios, with the least and the most."""
    ratios = sorted(one[base] / one[other] for one in rounds)
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


_REPORT = """# A training step over a slow link: `comm` against FSDP2

`python {command}`, {environment}.

Four gloo ranks in two network namespaces, each of which sends at most {link} to the other; a Llama of {parameters:.1f}
million weights in float32, {rows} rows of {tokens} tokens a rank; forward, backward, AdamW. Medians of {rounds}
interleaved rounds, the slowest rank's times. FSDP2 as it is spends {share:.0%} of a step in communication: the rest is
what a step takes where nothing is sent. `bf16` sends 16 bits, in two hops.

| | seconds | faster than FSDP2 (least to most) |
|---|---|---|
{table}
"""

if __name__ == "__main__":
    main()
