"""A sum of 16-bit tensors over the ranks that is added up in float32, in the bytes of an all-reduce of 16 bits.

Each rank adds up an equal share of the numbers, in the ranks' order, and rounds the sum once.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .exchange import Exchange
from .kernels import kernel
from .quantisation import sum_in_order


class WideSum(Exchange):
    @torch.no_grad()
    def __init__(self, own: torch.Tensor, group: str) -> None:
        super().__init__(torch.empty_like(own, memory_format=torch.contiguous_format), group)
        # a copy: a compiled program hands the memory of `own` to the next kernel
        self.sent = pad(own.flatten().clone(), (0, -own.numel() % self.group.size())).view(self.group.size(), -1)

    def sum_received(self, received: torch.Tensor) -> torch.Tensor:
        return _sum(received)

    def fill_total(self, gathered: torch.Tensor) -> None:
        self.total.copy_(gathered.view(-1)[: self.total.numel()].view_as(self.total))


@kernel(any_number=1)
def _sum(received: torch.Tensor) -> torch.Tensor:
    return sum_in_order(received.float()).to(received.dtype)


@torch.library.custom_op("rewired::start_wide_sum", mutates_args=())
def start_wide_sum(own: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of all ranks' tensors, of 16 bits as they are, under way: to be read only after a wait."""
    return WideSum(own, group).start()


start_wide_sum.register_fake(lambda own, group: torch.empty_like(own, memory_format=torch.contiguous_format))
