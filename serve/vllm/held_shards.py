"""Several logical shards on one rank: vLLM's own projections, which read and write shard by shard.

A reader multiplies the views of all held shards with all of the rank's rows, and keeps of each what is that shard's
own. A writer multiplies the input of one shard at a time, zeros elsewhere. vLLM's kernels run as they are, on as many
times the tokens as shards are held: good to evaluate a model on fewer GPUs than it was made for, too slow to serve it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from rewired.model.residual_stream import PeekGain
from rewired.model.sharding import one_shard_at_a_time, own_rows
from rewired.model.wiring import ModuleWiring


def hold_shards(module: nn.Module, wiring: ModuleWiring, held: int) -> None:
    """Make the projections of an attention or an MLP work shard by shard where its wiring asks for it, in place."""
    for projection in module.children():
        if isinstance(projection, ColumnParallelLinear) and wiring.reads_shards:
            projection.__class__ = _reader(type(projection))  # type: ignore[arg-type]
            projection.held = held
        if isinstance(projection, RowParallelLinear) and wiring.gives_partials:
            projection.__class__ = _writer(type(projection))  # type: ignore[arg-type]
            projection.held = held


@cache
def _reader(stock: type) -> type:
    class ReadsShards(stock):
        held: int

        def forward(self, views: torch.Tensor) -> Any:
            """[held * T, H] -> [T, out]."""
            output, bias = super().forward(views)
            parts = output.unflatten(0, (self.held, -1)).split(self.output_partition_sizes, -1)
            return torch.cat([own_rows(part) for part in parts], -1), bias

    return ReadsShards


@cache
def _writer(stock: type) -> type:
    class WritesShards(stock):
        held: int

        def forward(self, hidden_states: torch.Tensor) -> Any:
            """[T, in] -> [held, T, H]."""
            output, bias = super().forward(one_shard_at_a_time(hidden_states, self.held).flatten(0, 1))
            return output.unflatten(0, (self.held, -1)), bias

    return WritesShards


class HeldGain(PeekGain):
    """The gains of the shards that this rank holds, [held, H]."""

    def forward(self, settled: torch.Tensor, own_parts: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(settled, own_parts, self.weight[:, None, :])  # [held, T, H]
