"""A training step over a slow link between two nodes: `comm` against FSDP2's own collectives.

    sudo .venv/bin/python benchmarks/bench_comm.py --link 150mbit

Four ranks in two network namespaces, which are the nodes; what one sends the other passes a token bucket. All ways of
communication take turns in the same ranks, on copies of one small Llama, and so does a step whose collectives stay on
the rank, which is what a step takes without a network. A time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Seconds, faster, in_turns

from rewired.bench.link import EmulatedLink, EmulatedNetwork
from rewired.comm.communication import Communication
from rewired.comm.nodes import Nodes
from rewired.comm.options import PRESETS, Comm
from rewired.ranks import run_on_ranks
from rewired.tables import markdown

RANKS, RANKS_PER_NODE = 4, 2
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 6}
VOCABULARY, ROWS, TOKENS = 2048, 2, 512
PLAIN, ALONE = "FSDP2", "no network"
BF16 = Comm("bf16", "bf16", "bf16", secondary_shard="none", hadamard=False)
WAYS: dict[str, Comm | None] = {
    ALONE: None,
    PLAIN: None,
    "bf16": BF16,
    "zero++": PRESETS["zero++"],
    "slow-link": PRESETS["slow-link"],
    # parts of ZeRO++, each alone on top of bf16
    "qwZ": replace(BF16, weights="int8"),
    "hpZ": replace(BF16, secondary_shard="bf16"),
    "qgZ": replace(BF16, gradients="int4", gradients_in_node="int4", pipeline=2),
}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--link", default="150mbit", help="What a node may send, as `rewired bench --link` has it.")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:5], help="(default the first five)")
    args = made.parse_args()
    with EmulatedLink.parse(args.link).between(RANKS // RANKS_PER_NODE) as network:
        seconds = run_on_ranks(measure, RANKS, args.ways, args.rounds, prepare=OnNodes(network).enter)[0]
    base = PLAIN if PLAIN in seconds else args.ways[0]
    cells = [[name, f"{median(samples):.2f}", faster(seconds[base], samples)] for name, samples in seconds.items()]
    print(f"`{shlex.join(['python', *sys.argv])}`, torch {torch.__version__}.\n")
    if {ALONE, PLAIN} <= seconds.keys():
        share = median(1 - alone / whole for alone, whole in zip(seconds[ALONE], seconds[PLAIN], strict=True))
        print(f"FSDP2 as it is spends {share:.0%} of a step in communication.\n")
    print(markdown(["", "seconds", f"faster than {base} (quartiles)"], cells))


@dataclass(frozen=True)
class OnNodes:
    """Puts each rank into its node's namespace."""

    network: EmulatedNetwork
    ranks_per_node: int = RANKS_PER_NODE

    def enter(self, rank: int) -> None:
        self.network.enter(rank // self.ranks_per_node)


def measure(ways: Sequence[str], rounds: int) -> Seconds:
    """Of a step."""
    nodes = Nodes.of(RANKS_PER_NODE, "cpu")
    return in_turns({name: step_of(name, WAYS[name], nodes) for name in ways}, rounds)


def step_of(name: str, comm: Comm | None, nodes: Nodes) -> Callable[[], None]:
    model, optimizer = trained()
    for module in model.modules():
        if name == ALONE and isinstance(module, FSDPModule):
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


if __name__ == "__main__":
    main()
