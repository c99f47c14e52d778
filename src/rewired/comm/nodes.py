"""The ranks of a training as nodes of equally many.

Rank k is rank k % n of node k // n, as launchers number them. Ranks of the same number in their nodes form a group
`between` nodes: a rank talks to no other rank of another node.
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
    def of(cls, size: int, device_type: str) -> Nodes:
        """All ranks as nodes of `size`, which has to divide their number; all of them have to call this."""
        count = distributed.get_world_size() // size
        mesh = init_device_mesh(device_type, (count, size), mesh_dim_names=("between", "within"))
        return cls(count, size, mesh.get_group("between"), mesh.get_group("within"))
