"""KV heads for more ranks than there are: each repeated in the weights, and merged again.

Query head i reads KV head i // g, where g query heads share one. With each KV head c times in a row, g is c times as
small, so every query head reads a copy of its own, and the function stays. Engines that replicate KV heads do the same
while they load a model.
"""

from __future__ import annotations

from collections.abc import Callable
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
    return _with_heads(checkpoint, checkpoint.shape.num_key_value_heads * copies, copies * copies_in(checkpoint))


def write_with_copies(
    checkpoint: Checkpoint, copies: int, folder: Path, on_bytes: OnBytes = lambda count, total: None
) -> Checkpoint:
    """Write the weights of `checkpoint` with each KV head `copies` times into the empty `folder`, and its config.

    One file is in memory at a time.
    """
    return _write(
        checkpoint, with_copies(checkpoint, copies), lambda heads: heads.repeat_interleave(copies, 0), folder, on_bytes
    )


def write_merged(checkpoint: Checkpoint, folder: Path, on_bytes: OnBytes = lambda count, total: None) -> Checkpoint:
    """Write the weights of `checkpoint` with one of the copies of each KV head, which `are_equal`, likewise."""
    copies = copies_in(checkpoint)
    merged = _with_heads(checkpoint, checkpoint.shape.num_key_value_heads // copies, 1)
    return _write(checkpoint, merged, lambda heads: heads[::copies], folder, on_bytes)


def are_equal(checkpoint: Checkpoint) -> bool:
    """Whether all copies of each KV head are still the same."""
    copies, files = copies_in(checkpoint), checkpoint.tensors()
    for name in _tensors(checkpoint.shape):
        heads = _by_head(read_tensor(checkpoint.folder / files[name].file, name), checkpoint.shape)
        if not bool((heads == heads[::copies].repeat_interleave(copies, 0)).all()):
            return False
    return True


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


def _with_heads(checkpoint: Checkpoint, heads: int, copies: int) -> Checkpoint:
    config = {name: value for name, value in checkpoint.config.items() if name != KV_HEAD_COPIES}
    config |= {"num_key_value_heads": heads, **({KV_HEAD_COPIES: copies} if copies > 1 else {})}
    return replace(checkpoint, config=config, shape=replace(checkpoint.shape, num_key_value_heads=heads))


def _write(
    source: Checkpoint, target: Checkpoint, change: Callable[[Any], Any], folder: Path, on_bytes: OnBytes
) -> Checkpoint:
    changing = _tensors(source.shape)

    def changed(path: Path, name: str) -> Any:
        tensor = read_tensor(path, name)
        check_finite(name, tensor)
        return change(_by_head(tensor, source.shape)).flatten(0, 1).contiguous() if name in changing else tensor

    def tensors_of(path: Path) -> dict[str, Any]:
        return {name: changed(path, name) for name in read_header(path)}

    return rewrite(source, folder, target.config, tensors_of, on_bytes)


def _by_head(tensor: Any, shape: Shape) -> Any:
    """[KV heads * head_dim, ...] -> [KV heads, head_dim, ...]."""
    return tensor.unflatten(0, (shape.num_key_value_heads, shape.head_dim))


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
