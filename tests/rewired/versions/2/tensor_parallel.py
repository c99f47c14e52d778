"""Tensor parallelism: the part of each layer that a rank holds. transformers applies it when it loads a checkpoint.

transformers' plan splits the projections. The rule for the layer itself splits the rest and says which shards are held
here. From then on the layer multiplies with the weights that its rank holds (`sharding.py`), the residual stream owns
the all-reduces, and what transformers wraps around a projection's forward never runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils.stateless import _reparametrize_module
from transformers.distributed.tensor_parallel import TensorParallelLayer

from .collectives import sum_gradients
from .family import Family
from .residual_stream import PeekGain
from .sharding import Shards, on_this_rank


class RewiredLayerParallel(TensorParallelLayer):
    """Gives a decoder layer its rank's shards. Raises ValueError where the ranks cannot share them out evenly."""

    def install_forward(self, layer: Any, mesh: DeviceMesh) -> Any:
        check_not_quantised(layer.config)
        layer.place(shards_of_rank(layer.config, mesh))
        for module in layer.modules():
            if isinstance(module, PeekGain):
                rows = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
                module.weight = nn.Parameter(rows, requires_grad=module.weight.requires_grad)
        layer.forward = partial(_run_with_whole_gradients, layer, layer.forward)
        return layer


def _run_with_whole_gradients(layer: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `layer` on parameters whose gradients are summed over the ranks.

    Those that every rank holds (norm weights, biases of row-parallel projections, adapters) get only a part of their
    gradient from a rank's own view. One sum at the end of the layer's backward; none delays the stream's.
    """
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad and not _is_split(p)}
    summed = sum_gradients(layer.shards.group, *map(on_this_rank, parameters.values())) if parameters else ()
    with _reparametrize_module(layer, dict(zip(parameters, summed, strict=True))):
        return run(*args, **kwargs)


def check_not_quantised(config: Any) -> None:
    """Raise ValueError for a model whose quantised weights ranks were to share."""
    if getattr(config, "quantization_config", None):
        raise ValueError(
            "transformers does not split quantised weights over ranks as this model needs them: run it in one process, "
            "or serve it with vLLM."
        )


def shards_of_rank(config: Any, mesh: DeviceMesh) -> Shards:
    """The shards that a rank of `mesh` holds. Raises ValueError."""
    ranks = mesh.size()
    check_ranks(config.family, config, ranks)
    # where the function does not depend on the shards, a rank is one
    total = config.tp_shards if config.depends_on_shards else ranks
    return Shards(total, total // ranks, mesh.get_group().group_name)


def check_ranks(family: Family, config: Any, ranks: int, name: str = "tp_size") -> None:
    """Raise ValueError, naming the numbers, if `ranks` ranks cannot hold equal parts of a model, rewired or not."""
    family.check_ranks(config, ranks, config.tp_shards if getattr(config, "depends_on_shards", False) else None, name)


def _is_split(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)
