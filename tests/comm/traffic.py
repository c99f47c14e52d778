"""Bytes of the collectives that torch dispatches, whoever calls them, by whether their group crosses nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

WHOLE = {"_allgather_base_": 0, "alltoall_base_": 1, "_reduce_scatter_base_": 1}  # which argument has all of the data


class Traffic(TorchDispatchMode):
    """`between` and `within` nodes: the bytes of the whole data of a collective, of all ranks of a node.

    The paper's table counts so: it leaves out that a rank's own part need not travel. A group of all ranks makes one
    ring, which crosses nodes; of groups with one rank a node there are as many as a node has ranks.
    """

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__()
        self.ranks_per_node = ranks_per_node
        self.between = self.within = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if func.namespace == "c10d" and (name in WHOLE or name == "send"):
            group = distributed.ProcessGroup.unbox(args[1 if name == "send" else 2])
            nodes = [rank // self.ranks_per_node for rank in distributed.get_process_group_ranks(group)]
            data = args[WHOLE[name]].nbytes if name in WHOLE else _whole(args[0], len(nodes))
            if len(set(nodes)) == 1:
                self.within += data * (len(nodes) > 1)
            elif len(set(nodes)) == len(nodes):
                self.between += data * self.ranks_per_node
            else:
                self.between += data
        return func(*args, **(kwargs or {}))

    def take(self) -> tuple[int, int]:
        """What was counted since the last call."""
        counted, self.between, self.within = (self.between, self.within), 0, 0
        return counted


def _whole(sent: list[torch.Tensor], ranks: int) -> int:
    """Of which a rank sends a part to each of the others."""
    return sent[0].nbytes * ranks // (ranks - 1)
