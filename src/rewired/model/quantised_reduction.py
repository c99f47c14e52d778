"""A reduction of quantised parts over the ranks: all-to-all, sum, all-gather.

Each rank sums up an equal part of all groups of channels. It receives every shard's packed part of them, adds these up
in float32, quantises the sum, and sends that back to all. So the sum does not depend on how shards lie on ranks: it is,
bit for bit, `quantised_sum` of the same parts.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache

import torch
from torch._C._distributed_c10d import Work, _register_work
from torch.distributed.distributed_c10d import _get_group_size_by_name
from torch.nn.functional import pad

from .payload import GROUP, SCALE_BYTES, Sections
from .quantisation import in_groups, pack, split, unpack

_wait = torch.ops._c10d_functional.wait_tensor


def start_quantised_sum(parts: torch.Tensor, sections: Sections, group: str) -> torch.Tensor:
    """The quantised sum of all ranks' parts, [held, B, T, C] -> [B, T, C], under way: to be read only after a wait."""
    total = parts.new_empty(parts.shape[1:])
    _register_work(total, _Reduction(parts, sections, group, total))
    return total


class _Reduction(Work):
    """What a wait for `total` waits for.

    On a GPU all of it runs on a stream of its own, from the start on. Gloo has no such queue: there the all-to-all
    is under way from the start, and sum and all-gather run in the wait, in the same order on all ranks.
    """

    def __init__(self, parts: torch.Tensor, sections: Sections, group: str, total: torch.Tensor) -> None:
        super().__init__()
        self.sections, self.group, self.total = sections, group, total
        self.ranks = _get_group_size_by_name(group)  # type: ignore[arg-type]  # a str
        self.groups = [total.shape[:-1].numel() * -(-channels // GROUP) for _, channels in sections]
        self.share = [-(-number // self.ranks) for number in self.groups]  # of each rank
        self.sent = self._pack(parts)  # kept, as all buffers are, until nobody can read it any more
        self.received = _all_to_all(self.sent, self.ranks, group)
        self.event: torch.cuda.Event | None = None
        if total.is_cuda:
            stream = _side_stream(total.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._finish()
                self.event = stream.record_event()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.event is None:
            self._finish()
        else:
            self.event.wait()
        return True

    @torch.no_grad()
    def _pack(self, parts: torch.Tensor) -> torch.Tensor:  # [w, held, bytes of a rank's share]
        shares = []
        for (bits, _), part, number, share in zip(
            self.sections, split(parts, self.sections), self.groups, self.share, strict=True
        ):
            rows = pack(in_groups(part), bits).flatten(1, -2)  # [held, number, bytes of a group]
            rows = pad(rows, (0, 0, 0, share * self.ranks - number))
            shares.append(rows.unflatten(1, (self.ranks, share)).flatten(2).transpose(0, 1))
        return torch.cat(shares, dim=-1)

    @torch.no_grad()
    def _finish(self) -> None:
        received = _wait(self.received).flatten(0, 1)  # [r, bytes of a rank's share]
        dtype = torch.promote_types(self.total.dtype, torch.float32)
        sums = [
            pack(unpack(rows, bits, dtype).sum(0), bits).flatten()
            for rows, (bits, _) in zip(self._rows(received), self.sections, strict=True)
        ]
        self.own = torch.cat(sums)
        self.gathered = _wait(_all_gather(self.own, self.ranks, self.group)).unflatten(0, (self.ranks, -1))
        for rows, (bits, channels), number, into in zip(
            self._rows(self.gathered), self.sections, self.groups, split(self.total, self.sections), strict=True
        ):
            groups = unpack(rows.flatten(0, 1)[:number], bits, dtype)
            into.copy_(groups.view(*into.shape[:-1], -1)[..., :channels])

    def _rows(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """[n, bytes of a rank's share] -> of each section [n, share, bytes of a group]."""
        widths = [GROUP * bits // 8 + SCALE_BYTES for bits, _ in self.sections]
        sizes = [share * width for share, width in zip(self.share, widths, strict=True)]
        parts = packed.split(sizes, dim=-1)
        return [part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True)]


def _all_to_all(packed: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Row k of every rank's `packed` to rank k."""
    return torch.ops._c10d_functional.all_to_all_single(packed, [1] * ranks, [1] * ranks, group)


def _all_gather(packed: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return torch.ops._c10d_functional.all_gather_into_tensor(packed, ranks, group)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
