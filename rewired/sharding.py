"""The shard axis: stock Llama modules, run on views that differ per tensor-parallel shard.

Shard k owns the k-th block of rows of a column-parallel projection (q, k, v, gate, up) and the k-th block of columns
of a row-parallel one (o, down). One batched matmul multiplies every shard's view with its own block, so the work is
that of the plain projection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.func import functional_call

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


class OnShards:
    """An attention or MLP as its own `forward` should see it where a shard axis comes in or goes out.

    `LlamaAttention.forward(OnShards(attention, ...), ...)` runs transformers' own code: all attributes are the
    module's, but its projections read [B, T, r * H] (`reads_shards`) and its last one gives partial sums
    [r, B, T, H] (`gives_partials`).
    """

    def __init__(self, module: nn.Module, tp_shards: int, reads_shards: bool, gives_partials: bool) -> None:
        self.module = module
        self.tp_shards = tp_shards
        self.reads_shards = reads_shards
        self.gives_partials = gives_partials

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.module, name)
        if name in COLUMN_PARALLEL and self.reads_shards:
            return partial(column_parallel, attribute, self.tp_shards)
        if name in ROW_PARALLEL and self.gives_partials:
            return partial(row_parallel, attribute, self.tp_shards)
        return attribute


def pack_shards(views: torch.Tensor) -> torch.Tensor:
    """[r, B, T, H] -> [B, T, r * H]: stock modules take the leading axes for batch and sequence."""
    return views.movedim(0, -2).flatten(-2)


def column_parallel(projection: nn.Module, tp_shards: int, packed: torch.Tensor) -> torch.Tensor:
    """Every shard's view times its own rows: [B, T, r * H] -> [B, T, out]."""
    views = packed.unflatten(-1, (tp_shards, -1))  # [B, T, r, H]
    if not _is_plain_linear(projection):
        return torch.cat(_each_shard(projection, _column_block, views.unbind(-2)), dim=-1)
    weight = projection.weight.unflatten(0, (tp_shards, -1))  # [r, out / r, H]
    output = torch.einsum("btrh,roh->btro", views, weight).flatten(-2)
    return output if projection.bias is None else output + projection.bias


def row_parallel(projection: nn.Module, tp_shards: int, hidden_states: torch.Tensor) -> torch.Tensor:
    """Every shard's partial sum: [B, T, in] -> [r, B, T, H]. A bias counts as bias / r on each shard."""
    shards = hidden_states.unflatten(-1, (tp_shards, -1))  # [B, T, r, in / r]
    if not _is_plain_linear(projection):
        return torch.stack(_each_shard(projection, _row_block, shards.unbind(-2)))
    weight = projection.weight.unflatten(1, (tp_shards, -1))  # [H, r, in / r]
    partials = torch.einsum("btri,hri->rbth", shards, weight)
    return partials if projection.bias is None else partials + projection.bias / tp_shards


def _is_plain_linear(projection: nn.Module) -> TypeGuard[nn.Linear]:
    return type(projection) is nn.Linear


def _each_shard(
    projection: nn.Module,
    block: Callable[[str, torch.Tensor, int, int], torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
) -> list[torch.Tensor]:
    """A LoRA-wrapped projection, shard by shard: PEFT's own forward on each shard's block of the parameters."""
    outputs = []
    for shard, shard_input in enumerate(inputs):
        parameters = {
            name: block(name, parameter, shard, len(inputs)) for name, parameter in projection.named_parameters()
        }
        outputs.append(functional_call(projection, parameters, (shard_input,)))
    return outputs


def _column_block(name: str, parameter: torch.Tensor, shard: int, tp_shards: int) -> torch.Tensor:
    """Rows of the weights that make the output; LoRA's A reads the whole view."""
    return parameter if _lora_half(name) == "A" else parameter.chunk(tp_shards)[shard]


def _row_block(name: str, parameter: torch.Tensor, shard: int, tp_shards: int) -> torch.Tensor:
    """Columns of the weights that read the input; LoRA's B makes the whole output."""
    if parameter.dim() == 1:
        return parameter / tp_shards
    return parameter if _lora_half(name) == "B" else parameter.chunk(tp_shards, dim=1)[shard]


def _lora_half(name: str) -> str | None:
    """'A', 'B' or, for the wrapped projection itself, None. Raises ValueError for what has no known blocks."""
    part = name.split(".")[0]
    halves = {"base_layer": None, "lora_A": "A", "lora_B": "B"}
    if part not in halves:
        raise ValueError(
            f"A projection with a shard axis holds '{name}': only plain linear layers and plain LoRA (no DoRA, no "
            "quantisation) are known to split over shards. Leave it out of target_modules, or use plain LoRA."
        )
    return halves[part]
