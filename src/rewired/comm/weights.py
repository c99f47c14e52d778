"""FSDP2's all-gather of weights in two hops: between nodes, quantised, then inside the node.

    rank 1 of node 0     shard 1 ─┐ between         ┌─ within
    rank 1 of node 1     shard 3 ─┴─> shards 1, 3 ──┴─> shards 0, 1, 2, 3

After the first hop the ranks of a node hold all of the weights between them: a secondary shard (hpZ of ZeRO++, arXiv
2306.10209, section 3.2). It stays good until the weights change, and so backward, and all else that runs before the
optimizer's next step, takes the second hop only. It is the very bytes that forward received: no copy that a gather
could overtake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from rewired.model.exchange import all_gather, wait

from .nodes import Nodes
from .packing import Packing, pack_shard, unpack_shards


class WeightGather(AllGather):
    """The all-gather of one layer's weights, packed by `packing`; without one they are sent as they are."""

    def __init__(self, nodes: Nodes, packing: Packing | None, keeps: bool) -> None:
        self.nodes, self.packing, self.keeps = nodes, packing, keeps
        self.secondary: torch.Tensor | None = None  # [nodes, bytes]

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Complete on return: on a GPU on the stream that FSDP2 gathers on, which hides it behind compute. With
        `async_op`, for CPUs, what crosses nodes is under way, and the rest is done in the wait for what is returned."""
        shards = self.secondary
        if shards is None:
            shards = self._between(input_tensor)  # before the output is written, of which the input is a part
            self.secondary = shards if self.keeps else None
        gathering = _Gathering(partial(self._write, output_tensor, shards))
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
    def _write(self, output: torch.Tensor, shards: torch.Tensor) -> None:
        gathered = wait(all_gather(wait(shards), self.nodes.within)).transpose(0, 1).flatten(0, 1)  # [ranks, bytes]
        output.copy_(self._unpacked(gathered, output.dtype).flatten())

    def _packed(self, shard: torch.Tensor) -> torch.Tensor:  # [bytes]
        if self.packing is None:
            return shard.clone().view(torch.uint8)
        return pack_shard(shard, packing=self.packing)

    def _unpacked(self, gathered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # [ranks, numbers of a shard]
        if self.packing is None:
            return gathered.contiguous().view(dtype)
        return unpack_shards(gathered, packing=self.packing, dtype=dtype)


class _Gathering(Work):
    """A gather of which the rest is done by who waits for it."""

    def __init__(self, complete: Callable[[], None]) -> None:
        super().__init__()
        self.complete = complete

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.complete()
        return True
