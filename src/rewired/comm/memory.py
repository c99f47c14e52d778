"""What `comm` keeps on a device, in bytes, for a dry run."""

from __future__ import annotations

from typing import Any

from rewired.adapt.recipe.keys import Recipe
from rewired.model.payload import FORMATS

from .options import Comm
from .packing import BLOCK

_INT8, _BF16 = FORMATS[8].group_bytes(BLOCK) / BLOCK, 2.0  # bytes of a number


def kept_bytes(comm: Comm, recipe: Recipe, model: Any, itemsize: int, teacher: float) -> dict[str, float]:
    """Of the parts that are kept, by their names. Weights have `itemsize` bytes, and a device's part of the original
    has `teacher` in all. Norms count as matrices do."""
    on_node = comm.node_size(recipe.fsdp_size, recipe.tp_size)
    trained, frozen, learning = (numbers / recipe.tp_size for numbers in _numbers(model))
    parts = {}
    if comm.secondary_shard != "none":
        is_int8 = comm.weights == "int8" and comm.secondary_shard == "node"
        parts["secondary shard"] = trained / on_node * (_INT8 if is_int8 else _BF16)
    if comm.gather_frozen == "once":
        parts["frozen weights gathered once"] = (frozen * itemsize + teacher * recipe.fsdp_size) / on_node
    if comm.error_feedback:  # of the hop that is the last one
        parts["error feedback"] = learning / (on_node if on_node < recipe.fsdp_size else 1) * _INT8
    return parts


def _numbers(model: Any) -> tuple[int, int, int]:
    """The parameters of what is gathered with something that is trained, of all else, and of matrices that are trained.

    A layer is gathered as one.
    """
    layers = [list(layer.parameters()) for layer in model.base.decoder_layers]
    inside = {parameter for layer in layers for parameter in layer}
    groups = [*layers, *([parameter] for parameter in model.parameters() if parameter not in inside)]
    trained = sum(one.numel() for group in groups if any(one.requires_grad for one in group) for one in group)
    learning = sum(one.numel() for one in model.parameters() if one.requires_grad and one.dim() > 1)
    return trained, sum(one.numel() for one in model.parameters()) - trained, learning
