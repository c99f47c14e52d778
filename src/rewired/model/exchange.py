"""Bytes from every rank to every other, under way: each is to be read only after a wait for it.

NCCL has both collectives. By those of gloo (torch 2.13) the two directions of a slow link take turns, as they do where
a send is posted before a receive: an all-to-all takes twice its time, an all-gather half as much again. Here a rank is
ready to receive before it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
from torch._C._distributed_c10d import Work, _register_work
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from .side_stream import SideStream


class Exchange(Work):
    """A sum by an all-to-all of rows, a sum of those that arrive, and an all-gather; what a wait for `total` waits for.

    On a GPU all of it runs on a stream of its own, from the start on. Gloo has no such queue: there the all-to-all
    is under way from the start, and sum and all-gather run in the wait, in the same order on all ranks.

    All buffers are kept until nobody can read them any more.
    """

    sent: torch.Tensor  # [w, ...], row k for rank k

    def __init__(self, total: torch.Tensor, group: str) -> None:
        super().__init__()
        self.total, self.group = total, _resolve_process_group(group)  # type: ignore[arg-type]  # a str
        self.event: torch.cuda.Event | None = None

    def sum_received(self, received: torch.Tensor) -> torch.Tensor:
        """This rank's share of the sum, as it is sent to all: [w, ...] -> [...]."""
        raise NotImplementedError

    def fill_total(self, gathered: torch.Tensor) -> None:
        """Write all shares, [w, ...], to `total`."""
        raise NotImplementedError

    def start(self) -> torch.Tensor:
        """The total, under way."""
        self.received = all_to_all(self.sent, self.group)
        if self.total.is_cuda:
            _, self.event = _side_stream(self.total.device).run(self._finish)
        _register_work(self.total, self)
        return self.total

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.event is None:
            self._finish()
        else:
            self.event.wait()
        return True

    @torch.no_grad()
    def _finish(self) -> None:
        self.own = self.sum_received(wait(self.received))
        self.gathered = wait(all_gather(self.own, self.group))
        self.fill_total(self.gathered)


@cache
def _side_stream(device: torch.device) -> SideStream:
    return SideStream(device)


_functional = torch.ops._c10d_functional
wait = _functional.wait_tensor


def all_to_all(packed: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Row k of every rank's tensor to rank k, which receives them in the ranks' order: [w, ...] -> [w, ...]."""
    packed = packed.contiguous()
    if packed.is_cuda:
        one_each = [1] * group.size()
        return _functional.all_to_all_single(packed, one_each, one_each, group.group_name)
    return _exchanged(list(packed), group)


def all_gather(packed: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks, in their order: [...] -> [w, ...]."""
    packed = packed.contiguous()
    if packed.is_cuda:
        return _functional.all_gather_into_tensor(packed[None], group.size(), group.group_name)
    return _exchanged([packed] * group.size(), group)


def _exchanged(rows: Sequence[torch.Tensor], group: ProcessGroup) -> torch.Tensor:
    """`rows[k]` to rank k; what arrives, in the ranks' order."""
    own = rows[group.rank()]
    received = own.new_empty(len(rows), *own.shape)
    works = post(rows, received, group)
    received[group.rank()] = own
    _register_work(received, _All(rows, works))
    return received


def post(rows: Sequence[torch.Tensor], received: torch.Tensor, group: ProcessGroup) -> list[Work]:
    """Receive from every other rank, and send to it."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    receives = [group.recv([received[rank]], rank, 0) for rank in others]
    sends = [group.send([rows[rank]], rank, 0) for rank in others]
    return receives + sends


class _All(Work):
    """All of some works, and what they send, which is not to be freed before."""

    def __init__(self, rows: Sequence[torch.Tensor], works: Sequence[Work]) -> None:
        super().__init__()
        self.rows, self.works = rows, works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self.works:
            work.wait()
        return True
