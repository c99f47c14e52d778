"""FSDP2's reduce-scatter of gradients in two hops of all-to-all: inside the node, then between nodes.

Each hop sends quantised parts, and sums what it received in float32 (qgZ of ZeRO++, arXiv 2306.10209, section 3.3):
nothing is quantised twice on its way but the sums of nodes. Rank k of a node first sums up the slices of all ranks that
have the number k in their nodes, so that after the second hop each slice is where it belongs: the paper's reordering
of slices (its equations 1 and 2). In a `pipeline` of several chunks, one is between nodes while the next one is inside
the node (its section 4.1.2).

A rotation is linear, and sums are taken of rotated gradients; it is undone once, at the end.

On a GPU all of it is on the stream that FSDP2 reduces on, behind the backward of the layer before. On a CPU FSDP2 drops
what an asynchronous reduction returns: there the last hop is left under way until backward ends (AxoNN's ORS, arXiv
2305.13525, section 4), where nobody reads the gradients before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from rewired.model.exchange import all_to_all, wait
from rewired.model.payload import FORMATS
from rewired.model.quantisation import pack, unpack

from .nodes import Nodes
from .options import Comm
from .packing import BLOCK, Layout, Packing, Parts, add_up, hadamard, in_chunks, join_parts, pack_parts, split_slices

_ERROR_BITS = 8
_NEW_ERROR = 0.5  # the share of a step's error in the moving average


class GradientScatter(DefaultAllocMixin, ReduceScatter):
    """The reduce-scatter of one layer's gradients, whose `layout` is that of the parameters that are trained.

    `read_at_once` says of an output's dtype whether FSDP2 reads what it gets before backward ends.
    """

    def __init__(
        self, nodes: Nodes, layout: Layout, comm: Comm, read_at_once: Callable[[torch.dtype], bool] = lambda _: True
    ) -> None:
        self.nodes, self.layout, self.comm, self.read_at_once = nodes, layout, comm, read_at_once
        self.done = 0.0  # how much of the training is
        self.error: torch.Tensor | None = None  # of the last hop, packed: [receivers, ..., blocks, bytes of a block]
        self._rest: Callable[[], None] | None = None  # of a reduction under way

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Complete on return, or when backward has ended."""
        self._complete()  # where a layer is reduced twice in a backward
        slices = input_tensor.view(self.nodes.count, self.nodes.ranks, -1)
        parts = split_slices(slices, *self._rotation(slices), layout=self.layout)  # for each rank of the node
        in_node, between = self.comm.hops(self.done)
        of_node = [
            (blocks, self._hop(blocks, chunk, in_node, self.nodes.within, self.nodes.count == 1))
            for blocks, chunk in in_chunks(parts, self.comm.pipeline)
        ]  # all of them under way
        totals = [self._hop(blocks, total(), between, self.nodes.between, True) for blocks, total in of_node]
        self._rest = partial(self._write, output_tensor, totals, _factor(op, group.size()))
        if input_tensor.is_cpu and not self.read_at_once(output_tensor.dtype) and op != ReduceOp.SUM:
            Variable._execution_engine.queue_callback(self._complete)
        else:
            self._complete()

    def _hop(self, blocks: slice, parts: Parts, dtype: str, group: ProcessGroup, is_last: bool) -> Callable[[], Parts]:
        """Send row k of every rank's `parts`, which are those of a chunk's `blocks`, to rank k of the group, which gets
        their sum when it asks for it."""
        if group.size() == 1:
            return lambda: Parts(parts.blocks[0], parts.others[0])
        packing = Packing(dtype, parts.layout)
        if self.comm.error_feedback and is_last and packing.bits is not None:
            packed = self._pack_with_error(blocks, parts, packing)
        else:
            packed = pack_parts(*parts, packing=packing)
        arriving = all_to_all(packed, group)
        return lambda: add_up(wait(arriving), packing=packing)

    def _pack_with_error(self, blocks: slice, parts: Parts, packing: Packing) -> torch.Tensor:
        """LoCo's moving average of what quantisation loses, kept in 8 bits, is added (arXiv 2407.04480)."""
        if self.error is None:
            number = -(-self.layout.numbers(True) // BLOCK)
            shape = *parts.blocks.shape[:-2], number, FORMATS[_ERROR_BITS].group_bytes(BLOCK)
            self.error = torch.zeros(shape, dtype=torch.uint8, device=parts.blocks.device)
        kept = self.error[..., blocks, :]
        before = unpack(kept, _ERROR_BITS, torch.float32)
        parts = parts._replace(blocks=parts.blocks + before)
        packed = pack_parts(*parts, packing=packing)
        lost = parts.blocks - packing.unpack(packed).blocks
        kept.copy_(pack((1 - _NEW_ERROR) * before + _NEW_ERROR * lost, _ERROR_BITS))
        return packed

    def _write(self, output: torch.Tensor, totals: Sequence[Callable[[], Parts]], factor: float) -> None:
        first, *others = [total() for total in totals]
        if others:
            first = first._replace(blocks=torch.cat([first.blocks, *(chunk.blocks for chunk in others)], dim=-2))
        output.copy_(join_parts(*first, *self._rotation(output), layout=self.layout, factor=factor))

    def _rotation(self, like: torch.Tensor) -> list[torch.Tensor]:
        return [hadamard(like.device)] if self.comm.hadamard else []

    @torch.no_grad()
    def _complete(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            rest()


def _factor(op: Any, ranks: int) -> float:
    """What the sum is multiplied by; FSDP2 has a factor of its own where set_gradient_divide_factor was called."""
    if op == ReduceOp.AVG:
        return 1 / ranks
    return float(op.__getstate__()[1]) if op == ReduceOp.PREMUL_SUM else 1.0
