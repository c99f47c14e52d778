"""FSDP2's reduce-scatter of gradients in two hops of all-to-all: inside the node, then between nodes.

Each hop sends quantised parts, and sums what it received in float32 (qgZ of ZeRO++, arXiv 2306.10209, section 3.3):
nothing is quantised twice on its way but the sums of nodes. Rank k of a node first sums up the slices of all ranks that
have the number k in their nodes, so that after the second hop each slice is where it belongs: the paper's reordering
of slices (its equations 1 and 2).

A rotation is linear, and sums are taken of rotated gradients; it is undone once, at the end.

On a GPU all of it is on the stream that FSDP2 reduces on, behind the backward of the layer before. On a CPU FSDP2 drops
what an asynchronous reduction returns: there the last hop is left under way until backward ends (AxoNN's ORS, arXiv
2305.13525, section 4), where nobody reads the gradients before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from rewired.model.exchange import all_to_all, wait
from rewired.model.quantisation import pack, unpack

from .nodes import Nodes
from .options import Comm
from .packing import Layout, Packing, Parts, add_up, hadamard, join_parts, pack_parts, split_slices

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
        of_node = self._hop(parts, self.comm.gradients_in_node, self.nodes.within, self.nodes.count == 1)()
        total = self._hop(of_node, self.comm.gradients, self.nodes.between, True)
        self._rest = partial(self._write, output_tensor, total, _factor(op, group.size()))
        if input_tensor.is_cpu and not self.read_at_once(output_tensor.dtype) and op != ReduceOp.SUM:
            Variable._execution_engine.queue_callback(self._complete)
        else:
            self._complete()

    def _hop(self, parts: Parts, dtype: str, group: ProcessGroup, is_last: bool) -> Callable[[], Parts]:
        """Send row k of every rank's `parts` to rank k of the group, which gets their sum when it asks for it."""
        if group.size() == 1:
            return lambda: Parts(parts.blocks[0], parts.others[0])
        packing = Packing(dtype, self.layout)
        with_feedback = self.comm.error_feedback and is_last and packing.bits is not None
        if with_feedback and self.error is not None:
            parts = parts._replace(blocks=parts.blocks + unpack(self.error, _ERROR_BITS, torch.float32))
        packed = pack_parts(*parts, packing=packing)
        if with_feedback:
            self._remember(parts.blocks - packing.unpack(packed).blocks)
        arriving = all_to_all(packed, group)
        return lambda: add_up(wait(arriving), packing=packing)

    def _write(self, output: torch.Tensor, total: Callable[[], Parts], factor: float) -> None:
        output.copy_(join_parts(*total(), *self._rotation(output), layout=self.layout, factor=factor))

    def _rotation(self, like: torch.Tensor) -> list[torch.Tensor]:
        return [hadamard(like.device)] if self.comm.hadamard else []

    @torch.no_grad()
    def _complete(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            rest()

    def _remember(self, lost: torch.Tensor) -> None:
        """LoCo's moving average of what quantisation loses, kept in 8 bits (arXiv 2407.04480)."""
        before = 0.0 if self.error is None else unpack(self.error, _ERROR_BITS, torch.float32)
        self.error = pack((1 - _NEW_ERROR) * before + _NEW_ERROR * lost, _ERROR_BITS)


def _factor(op: Any, ranks: int) -> float:
    """What the sum is multiplied by; FSDP2 has a factor of its own where set_gradient_divide_factor was called."""
    if op == ReduceOp.AVG:
        return 1 / ranks
    return float(op.__getstate__()[1]) if op == ReduceOp.PREMUL_SUM else 1.0
