"""FSDP2's all-gather of weights in two hops: between nodes, quantised, then inside the node.

    rank 1 of node 0     shard 1 ─┐ between         ┌─ within
    rank 1 of node 1     shard 3 ─┴─> shards 1, 3 ──┴─> shards 0, 1, 2, 3

After the first hop the ranks of a node hold all of the weights between them: a secondary shard (hpZ of ZeRO++, arXiv
2306.10209, section 3.2). It stays good until the weights change, and so backward, and all else that runs before the
optimizer's next step, takes the second hop only. It is the very bytes that forward received, or these in 16 bits, which
forward makes before it computes: no copy that a gather could overtake.

Weights may also cross nodes as 4-bit differences to what all nodes hold of them already. What a node keeps of the last
gather is then a replica of all weights, in bfloat16. The owner of a shard has the same replica of it, and sends how the
weights differ from that, not from what they were: so a difference makes up for what the one before it lost, and errors
do not add up. A replica is whole before its first difference, which is not sent in 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from rewired.model.exchange import all_gather, wait

from .nodes import Nodes
from .packing import Layout, Packing, Parts, pack_shard, repack, unpack_shards


class WeightGather(DefaultAllocMixin, AllGather):
    """The all-gather of one layer's weights, packed by `packing`; without one they are sent as they are. What crossed
    nodes it `keeps` as it is, or packed by `kept`."""

    def __init__(self, nodes: Nodes, packing: Packing | None, keeps: bool, kept: Packing | None = None) -> None:
        self.nodes, self.packing, self.keeps, self.kept = nodes, packing, keeps, kept or packing
        self.secondary: torch.Tensor | None = None  # [nodes, bytes]

    @torch.no_grad()
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Complete on return: on a GPU on the stream that FSDP2 gathers on, which hides it behind compute. With
        `async_op`, for CPUs, what crosses nodes is under way, and the rest is done in the wait for what is returned."""
        shards, packing = self.secondary, self.kept
        if shards is None:
            shards = self._between(input_tensor)  # before the output is written, of which the input is a part
            packing = self.packing
            self.secondary = shards if self.keeps and packing == self.kept else None
        gathering = _Gathering(partial(self._write, output_tensor, shards, packing))
        if async_op:
            return gathering
        gathering.wait()
        return None

    def forget(self) -> None:
        """The weights have changed: the next gather crosses nodes."""
        self.secondary = None

    def _between(self, shard: torch.Tensor) -> torch.Tensor:  # [nodes, bytes], under way
        return all_gather(self._packed(shard), self.nodes.between)

    @torch.no_grad()
    def _write(self, output: torch.Tensor, shards: torch.Tensor, packing: Packing | None) -> None:
        gathered = wait(all_gather(wait(shards), self.nodes.within)).transpose(0, 1).flatten(0, 1)  # [ranks, bytes]
        output.copy_(_unpacked(gathered, packing, output.dtype).flatten())
        if self.keeps and packing and self.kept and packing != self.kept:
            self.secondary = repack(shards, packing=packing, kept=self.kept)

    def _packed(self, shard: torch.Tensor) -> torch.Tensor:  # [bytes]
        if self.packing is None:
            return shard.clone().view(torch.uint8)
        return pack_shard(shard, packing=self.packing)


class DifferenceGather(WeightGather):
    """The all-gather of one layer's weights as differences; inside the node, they travel in bfloat16."""

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


def _unpacked(gathered: torch.Tensor, packing: Packing | None, dtype: torch.dtype) -> torch.Tensor:
    """[ranks, bytes] -> [ranks, numbers of a shard]."""
    if packing is None:
        return gathered.contiguous().view(dtype)
    return unpack_shards(gathered, packing=packing, dtype=dtype)


class _Gathering(Work):
    """A gather of which the rest is done by who waits for it."""

    def __init__(self, complete: Callable[[], None]) -> None:
        super().__init__()
        self.complete = complete

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.complete()
        return True
