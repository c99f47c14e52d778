"""KV heads for more ranks than there are: each repeated in the weights.

Query head i reads KV head i // g, where g query heads share one. With each KV head c times in a row, g is c times as
small, so every query head reads a copy of its own, and the function stays. Engines that replicate KV heads do the same
while they load a model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rewired.model.family import KV_HEADS
from rewired.quantities import size

from .checkpoint import Checkpoint
from .records import KV_HEAD_COPIES
from .safetensors_header import read_header
from .shape import Shape, cache_bytes
from .tensors import OnBytes, check_finite, read_tensor, rewrite


def copies_in(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config.get(KV_HEAD_COPIES, 1))


def with_copies(checkpoint: Checkpoint, copies: int) -> Checkpoint:
    """`checkpoint` with each KV head `copies` times, as far as its config goes: its files have them once."""
    heads, all_copies = checkpoint.shape.num_key_value_heads * copies, copies_in(checkpoint) * copies
    config = checkpoint.config | {"num_key_value_heads": heads}
    if all_copies > 1:
        config[KV_HEAD_COPIES] = all_copies
    return replace(checkpoint, config=config, shape=replace(checkpoint.shape, num_key_value_heads=heads))


def write_with_copies(
    checkpoint: Checkpoint, copies: int, folder: Path, on_bytes: OnBytes = lambda count, total: None
) -> Checkpoint:
    """Write the weights of `checkpoint` with each KV head `copies` times into the empty `folder`, and its config.

    One file is in memory at a time.
    """
    shape, changing = checkpoint.shape, _tensors(checkpoint.shape)

    def copied(path: Path, name: str) -> Any:
        tensor = read_tensor(path, name)
        check_finite(name, tensor)
        if name not in changing:
            return tensor
        by_head = tensor.unflatten(0, (shape.num_key_value_heads, shape.head_dim))
        return by_head.repeat_interleave(copies, 0).flatten(0, 1)

    def tensors_of(path: Path) -> dict[str, Any]:
        return {name: copied(path, name) for name in read_header(path)}

    return rewrite(checkpoint, folder, with_copies(checkpoint, copies).config, tensors_of, on_bytes)


def note_on_copies(shape: Shape, copies: int, ranks: int) -> str:
    """What `copies` of each KV head cost a model of `shape`, which has them."""
    once = replace(shape, num_key_value_heads=shape.num_key_value_heads // copies)
    more = 2 * shape.num_hidden_layers * (shape.layer_weights - once.layer_weights)
    before, after, of_rank = (cache_bytes(each, tp, 1) for each, tp in ((once, 1), (shape, 1), (shape, ranks)))
    return (
        f"Each of {once.num_key_value_heads} KV heads is there {copies} times, for {ranks} ranks: the same function. "
        f"In 16 bits, the weights take {size(more)} more. A token's keys and values take {size(after)} in one process, "
        f"{size(before)} before, and {size(of_rank)} on each rank, as in engines that replicate KV heads."
    )


def _tensors(shape: Shape) -> set[str]:
    """The names of those that are split by KV heads."""
    return {
        f"{shape.family.layer(layer)}.{module.path}.{linear.name}.{kind}"
        for layer in range(shape.num_hidden_layers)
        for module in shape.family.modules
        for linear in module.linears
        if linear.width == KV_HEADS
        for kind in ("weight", *(["bias"] if linear in shape.biases else []))
    }
