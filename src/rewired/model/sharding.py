"""The shard axis: stock modules, run on views that differ per tensor-parallel shard.

Shard k owns the k-th block of rows of a column-parallel projection, which reads the stream, and the k-th block of
columns of a row-parallel one, which writes to it. One batched matmul multiplies every shard's view with its own block,
so the work is that of the plain projection. Under tensor parallelism a rank holds the weights of its own shards only,
and runs the same code on those.

A projection that is more than a matmul, such as a quantised one or one that is watched, is called as it is: once for
each shard, with that shard's view or its part of the input. That is what a rank would compute, at r times the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from .family import Module


@dataclass(frozen=True)
class Shards:
    """How many shards a model has in all, and how many of them this process holds.

    They are its logical shards or, where its function does not depend on those, one for each rank.
    """

    total: int
    held: int
    group: str | None = None  # name of the process group of the ranks that hold all of them; None in one process

    @property
    def ranks(self) -> int:
        return self.total // self.held

    def as_one(self) -> Shards:
        """The held shards as a single one, where they read the same view or only their sum counts."""
        return Shards(self.ranks, 1, self.group)


class OnShards:
    """An attention or MLP as its own `forward` should see it where a shard axis comes in or goes out.

    `LlamaAttention.forward(OnShards(attention, ...), ...)` runs transformers' own code: all attributes are the
    module's, but its readers read [B, T, r * H] (`reads_shards`) and its writer gives partial sums [r, B, T, H]
    (`gives_partials`), for the r shards that this process holds.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Module,
        shards: Shards,
        reads_shards: bool,
        gives_partials: bool,
        stand_ins: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> None:
        self.module = module
        self.readers, self.writer = [linear.name for linear in names.readers], names.writer.name
        self.stand_ins = stand_ins or {}  # for projections of the module
        self.shards = shards
        self.reads_shards = reads_shards
        self.gives_partials = gives_partials

    def __getattr__(self, name: str) -> Any:
        if name in self.stand_ins:
            return self.stand_ins[name]
        attribute = getattr(self.module, name)
        is_split = self.shards.group is not None
        if name in self.readers and (is_split or self.reads_shards):
            return partial(column_parallel, attribute, self.shards if self.reads_shards else self.shards.as_one())
        if name == self.writer and self.gives_partials:
            return partial(row_parallel, attribute, self.shards)
        if name == self.writer:
            shards = self.shards.as_one() if is_split else self.shards
            return partial(_row_parallel_sum, attribute, shards)
        return attribute


def pack_shards(views: torch.Tensor) -> torch.Tensor:
    """[r, B, T, H] -> [B, T, r * H]: stock modules take the leading axes for batch and sequence."""
    return views.squeeze(0) if len(views) == 1 else views.movedim(0, -2).flatten(-2)


def column_parallel(projection: Any, shards: Shards, packed: torch.Tensor) -> torch.Tensor:
    """Every held shard's view times its own rows: [B, T, r * H] -> [B, T, out], `out` that of the held shards."""
    if hasattr(projection, "base_layer"):
        return _with_adapters(
            projection,
            column_parallel(projection.base_layer, shards, packed),
            packed,
            lambda a, x: linear(x.unflatten(-1, (shards.held, -1)), _parameters(a)[0]).flatten(-2),
            lambda b, low_rank: column_parallel(b, shards, low_rank),
        )
    if _is_called(projection, shards):
        return own_rows(_called_on_each(projection, packed.unflatten(-1, (shards.held, -1)).movedim(-2, 0)))
    weight, bias = _parameters(projection)
    if shards.held == 1:
        return linear(packed, weight, bias)
    views = packed.unflatten(-1, (shards.held, -1))  # [B, T, r, H]
    output = torch.einsum("btrh,roh->btro", views, weight.unflatten(0, (shards.held, -1))).flatten(-2)
    return output if bias is None else output + bias


def row_parallel(projection: Any, shards: Shards, hidden_states: torch.Tensor) -> torch.Tensor:
    """Every held shard's partial sum: [B, T, in] -> [r, B, T, H]. A bias counts as its part on each shard."""
    if hasattr(projection, "base_layer"):
        return _with_adapters(
            projection,
            row_parallel(projection.base_layer, shards, hidden_states),
            hidden_states,
            lambda a, x: row_parallel(a, shards, x),
            lambda b, low_rank: linear(low_rank, *_parameters(b, parts=shards.total)),
        )
    if _is_called(projection, shards):
        partials = _called_on_each(projection, one_shard_at_a_time(hidden_states, shards.held))
        bias = getattr(projection, "bias", None)
        return partials if bias is None else partials - bias * (1 - 1 / shards.total)
    weight, bias = _parameters(projection, parts=shards.total)
    if shards.held == 1:
        return linear(hidden_states, weight, bias)[None]
    inputs = hidden_states.unflatten(-1, (shards.held, -1))  # [B, T, r, in / r]
    partials = torch.einsum("btri,hri->rbth", inputs, weight.unflatten(1, (shards.held, -1)))
    return partials if bias is None else partials + bias


def _row_parallel_sum(projection: Any, shards: Shards, hidden_states: torch.Tensor) -> torch.Tensor:
    """The held shards' sum: [B, T, in] -> [B, T, H]."""
    if shards.held == 1 and is_plain_linear(projection):
        return linear(hidden_states, *_parameters(projection, parts=shards.total))
    return summed(row_parallel(projection, shards, hidden_states))


def summed(parts: torch.Tensor) -> torch.Tensor:
    """[r, ...] -> [...]; of one shard, the same memory."""
    return parts.squeeze(0) if len(parts) == 1 else parts.sum(0)


def _called_on_each(projection: Any, inputs: torch.Tensor) -> torch.Tensor:
    """[r, B, T, in] -> [r, B, T, out]. Stock modules see batches of sequences, and may scale activations by token."""
    return projection(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])


def own_rows(outputs: torch.Tensor) -> torch.Tensor:
    """What all rows make of every shard's view, [r, ..., out] -> what each shard's own make of its view, [..., out]."""
    blocks = outputs.unflatten(-1, (outputs.shape[0], -1))  # [r, ..., r, out / r]
    return blocks.diagonal(dim1=0, dim2=-2).transpose(-1, -2).flatten(-2)


def one_shard_at_a_time(inputs: torch.Tensor, held: int) -> torch.Tensor:
    """[..., in] -> [r, ..., in]: of copy k, only the part of shard k is not zero."""
    blocks = inputs.unflatten(-1, (held, -1))  # [..., r, in / r]
    alone = torch.eye(held, dtype=inputs.dtype, device=inputs.device)  # [r, r]
    return torch.stack([blocks * row[:, None] for row in alone]).flatten(-2)


def on_this_rank(parameter: Any) -> Any:
    """The rows or columns of a parameter that this rank holds; all of it in one process."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _parameters(projection: Any, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What this rank holds of a plain projection's weight, and of its bias, in so many equal parts."""
    hook = getattr(projection, "_hf_hook", None)  # accelerate's: it fetches offloaded weights when the module is called
    if hook is not None:
        hook.pre_forward(projection)
    weight, bias = on_this_rank(projection.weight), on_this_rank(projection.bias)
    if _is_in_4bit(projection):
        from transformers.integrations.bitsandbytes import dequantize_bnb_weight

        weight = dequantize_bnb_weight(weight)
    if hook is not None:
        hook.post_forward(projection, None)
    return weight, bias if bias is None or parts == 1 else bias / parts


def _is_called(projection: Any, shards: Shards) -> bool:
    """Whether a projection does its own work, once a shard.

    One of bitsandbytes in 4 bits is a matmul with the weight that it stands for: for several shards, that is faster.
    """
    return not (is_plain_linear(projection) or (_is_in_4bit(projection) and shards.held > 1))


def _is_in_4bit(projection: Any) -> bool:
    return hasattr(projection.weight, "quant_state")


def is_plain_linear(projection: Any) -> bool:
    """Whether it is a matmul and no more: neither quantised (by compressed-tensors, in place) nor watched by hooks.

    On ranks hooks do not count: a call would run what transformers wraps around it there.
    """
    is_split = isinstance(getattr(projection, "weight", None), DTensor)
    is_watched = bool(projection._forward_pre_hooks or projection._forward_hooks) and not is_split
    return type(projection) is nn.Linear and not (is_watched or hasattr(projection, "quantization_scheme"))


def _with_adapters(
    projection: Any,
    output: torch.Tensor,
    inputs: torch.Tensor,
    down: Callable[[nn.Linear, torch.Tensor], torch.Tensor],
    up: Callable[[nn.Linear, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The base layer's `output`, and what LoRA adapters add to it: `down` through A, `up` through B."""
    for name, rows in _adapters(projection, inputs):
        lora_a = projection.lora_A[name]
        low_rank = down(lora_a, projection.lora_dropout[name](inputs.to(lora_a.weight.dtype)))
        added = projection.scaling[name] * up(projection.lora_B[name], low_rank).to(output.dtype)
        output = output + (added if rows is None else added * rows)
    return output


def _adapters(projection: Any, inputs: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The active LoRA adapters of a projection that PEFT has wrapped, each with its rows of the batch: [B, 1, 1], or
    None for all. Raises ValueError for whatever else wraps it.
    """
    unknown = {name.split(".")[0] for name, _ in projection.named_parameters()} - {"base_layer", "lora_A", "lora_B"}
    is_lora = hasattr(projection, "lora_A") and not unknown
    by_row = _names_by_row(projection)
    names = (by_row or projection.active_adapters) if is_lora else ()
    if not is_lora or any(name in projection.lora_variant for name in names):
        raise ValueError(
            f"{type(projection).__name__} cannot be split over shards: of adapters, only plain LoRA (no DoRA, no "
            "aLoRA) is known to. Leave this projection out of target_modules, or use plain LoRA."
        )
    projection._check_forward_args(inputs, adapter_names=by_row)
    if projection.merged or projection.disable_adapters:
        return
    for name in dict.fromkeys(names):
        if name in projection.lora_A:
            rows = [each == name for each in by_row or ()]
            yield name, torch.tensor(rows, device=inputs.device)[:, None, None] if by_row else None


def _names_by_row(projection: Any) -> list[str] | None:
    """What `adapter_names` says: PEFT hands it to its layers by a hook, since the modules between do not take it."""
    for hook in projection._forward_pre_hooks.values():
        if isinstance(hook, partial) and "adapter_names" in hook.keywords:
            return list(hook.keywords["adapter_names"])
    return None
