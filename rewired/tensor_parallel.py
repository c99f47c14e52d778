"""Tensor parallelism: which rank holds what of a layer. transformers applies it when it loads a checkpoint.

Its own plan splits the projections. The rule for the layer itself splits the rest and says which shards are here; from
then on the layer multiplies with the weights that its rank holds (`sharding.py`), the residual stream owns the
all-reduces, and what transformers wraps around a projection's forward never runs.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.tensor_parallel import TensorParallelLayer

from .residual_stream import PeekGain
from .sharding import Shards
from .wiring import check_shards


class RewiredLayerParallel(TensorParallelLayer):
    """Gives a decoder layer its rank's shards. Raises ValueError where the ranks cannot share them out evenly."""

    def install_forward(self, layer: Any, mesh: DeviceMesh) -> Any:
        layer.place(shards_of_rank(layer.self_attn.config, mesh))
        for module in layer.modules():
            if isinstance(module, PeekGain):
                rows = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
                module.weight = nn.Parameter(rows, requires_grad=module.weight.requires_grad)
        return layer


def shards_of_rank(config: Any, mesh: DeviceMesh) -> Shards:
    """The logical shards that this rank of `mesh` holds. Raises ValueError."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    check_ranks(config, ranks)
    # where the function does not depend on the shards, a rank is one
    total = config.tp_shards if config.depends_on_shards else ranks
    held = total // ranks
    return Shards(total, held, rank * held, mesh.get_group().group_name)


def check_ranks(config: Any, ranks: int) -> None:
    """Raise ValueError, naming the numbers, if `ranks` ranks cannot hold equal parts of a Llama, rewired or not."""
    if getattr(config, "depends_on_shards", False) and config.tp_shards % ranks:
        raise ValueError(
            f"tp_size {ranks} does not divide tp_shards {config.tp_shards}: what this model computes depends on its "
            f"{config.tp_shards} logical shards, and every rank must hold as many; choose a tp_size that divides."
        )
    sizes = {
        name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    check_shards(ranks, "tp_size", **sizes)
