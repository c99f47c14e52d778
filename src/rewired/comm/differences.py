"""FSDP2's all-gather where weights cross nodes as 4-bit differences to what all nodes hold of them already.

What a node keeps of the last gather is a replica of all weights, in bfloat16. The owner of a shard has the same replica
of it, and sends how the weights differ from that, not from what they were: so a difference makes up for what the one
before it lost, and errors do not add up. A replica is whole before its first difference, which is not sent in 4 bits.
"""

from __future__ import annotations

import torch

from rewired.model.exchange import all_gather, wait

from .nodes import Nodes
from .packing import Layout, Packing, Parts
from .weights import WeightGather


class DifferenceGather(WeightGather):
    """The all-gather of one layer's weights; inside the node, they travel in bfloat16."""

    def __init__(self, nodes: Nodes, layout: Layout) -> None:
        self.whole, self.difference = Packing("bf16", layout), Packing("int4", layout)
        super().__init__(nodes, self.whole, keeps=True)
        self.replica: torch.Tensor | None = None  # [nodes, bytes], of the shards of this rank's number in all nodes

    def state(self) -> torch.Tensor | None:
        """The replica of this rank's own shard, [bytes]: a training is resumed with it.

        A resumed training sends a difference before anything else, and so has this one to do.
        """
        self.forget()
        return None if self.replica is None else self.replica[self.nodes.between.rank()].clone()

    def resume(self, state: torch.Tensor) -> None:
        """All ranks have to call this, each with its own."""
        self.replica = wait(all_gather(state, self.nodes.between))

    def _between(self, shard: torch.Tensor) -> torch.Tensor:
        if self.replica is None:
            self.replica = wait(super()._between(shard))
        weights, held = self.whole.layout.split(shard), self.whole.unpack(self.replica).blocks
        own = held[self.nodes.between.rank()]
        sent = self.difference.pack(weights._replace(blocks=weights.blocks - own))
        blocks, others = self.difference.unpack(wait(all_gather(sent, self.nodes.between)))
        self.replica = self.whole.pack(Parts(held + blocks, others))
        return self.replica
