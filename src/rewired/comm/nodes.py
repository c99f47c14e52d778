"""The ranks that shard a model between them, as nodes of equally many.

Rank k of them is rank k % n of node k // n, as launchers number them. Ranks of the same number in their nodes form a
group `between` nodes: a rank talks to no other rank of another node.

Replicas of the model shard it once each, and so do the ranks that share a layer, each its own part of that. Such ranks
follow one another, and so do those of a replica: the order of transformers' mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import distributed
from torch.distributed import ProcessGroup, init_device_mesh


@dataclass(frozen=True)
class Nodes:
    """`count` nodes of `ranks` ranks each, and this rank's two groups."""

    count: int
    ranks: int
    between: ProcessGroup
    within: ProcessGroup

    @classmethod
    def of(cls, size: int, device_type: str, replicas: int = 1, tp_size: int = 1) -> Nodes:
        """Nodes of `size` such ranks, which has to divide their number; all ranks have to call this."""
        count = distributed.get_world_size() // (replicas * size * tp_size)
        names = ("replicas", "between", "within", "tp")
        mesh = init_device_mesh(device_type, (replicas, count, size, tp_size), mesh_dim_names=names)
        return cls(count, size, mesh.get_group("between"), mesh.get_group("within"))
