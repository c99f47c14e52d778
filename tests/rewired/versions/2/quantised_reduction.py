"""A reduction of quantised parts over the ranks: all-to-all, sum, all-gather.

Each rank adds up an equal part of the groups of channels. It receives every shard's packed part of them, sums these in
float32, quantises the sum, and sends that back to all. So the sum does not depend on how shards lie on ranks: it is,
bit for bit, `quantised_sum` of the same parts, and so is what rounding leaves to each shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
from torch._C._distributed_c10d import Work, _register_work
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.functional import pad

from .kernels import kernel
from .payload import FORMATS, GROUP, Section, Sections
from .quantisation import QuantisedSum, add_up, deal_out, pack_parts, shares_of, split, unpack_sum
from .side_stream import SideStream


class RankReduction(Work):
    """The reduction of all ranks' parts, of which this one holds [held, B, T, C]; what a wait for `total` waits for.

    On a GPU all of it runs on a stream of its own, from the start on. Gloo has no such queue: there the all-to-all
    is under way from the start, and sum and all-gather run in the wait, in the same order on all ranks.
    """

    @torch.no_grad()
    def __init__(self, parts: torch.Tensor, sections: Sections, group: str) -> None:
        super().__init__()
        self.group = _resolve_process_group(group)  # type: ignore[arg-type]  # a str
        self.sections, self.ranks, self.rank = sections, self.group.size(), self.group.rank()
        self.total, self.left_of_sum = parts.new_empty(parts.shape[1:]), parts.new_empty(parts.shape)
        self.event: torch.cuda.Event | None = None
        # kept, as all buffers are, until nobody can read it any more
        self.sent, left = _pack(parts.flatten(1, -2), sections=sections, ranks=self.ranks)
        self.left = left.view(parts.shape)

    @property
    def outcome(self) -> QuantisedSum:
        return QuantisedSum(self.total, self.left, self.left_of_sum)

    def start(self) -> torch.Tensor:
        """The total, under way: it and what rounding leaves of it are to be read only after a wait for it."""
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
        received = wait(self.received).flatten(0, 1)
        left_of_sum = self.left_of_sum.flatten(1, -2)
        self.own = _add_up(received, left_of_sum, sections=self.sections, ranks=self.ranks, rank=self.rank)
        self.gathered = wait(all_gather(self.own[0], self.group))
        _unpack(self.gathered, self.total.flatten(0, -2)[None], sections=self.sections)


@kernel(any_number=1)
def _pack(parts: torch.Tensor, *, sections: Sections, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts, [held, tokens, C], as rows of bytes for each rank, [w, held, tokens, n], and what rounding leaves."""
    packed = [pack_parts(part, section.bits) for part, section in zip(split(parts, sections), sections, strict=True)]
    rows, left = zip(*packed, strict=True)
    return torch.cat([_for_ranks(each, ranks).flatten(-2) for each in rows], dim=-1), torch.cat(left, dim=-1)


@kernel(any_number=1)
def _add_up(received: torch.Tensor, left: torch.Tensor, *, sections: Sections, ranks: int, rank: int) -> torch.Tensor:
    """The sum of all shards' rows, [r, tokens, n], as this rank sends it to all, [1, tokens, n'].

    What rounding leaves goes to `left`, [held, tokens, C], for the shards that the rank holds.
    """
    held = slice(rank * len(left), (rank + 1) * len(left))
    dtype = torch.promote_types(left.dtype, torch.float32)
    left.zero_()
    own = []
    for rows, section, into in zip(
        _by_section(received, sections, [section.bits for section in sections], ranks),
        sections,
        split(left, sections),
        strict=True,
    ):
        row, left_of_sum = add_up(rows, section.bits, section.sum_bits, dtype)
        deal_out(left_of_sum, shares_of(_groups(section), len(received))[held], into)
        own.append(row.flatten(-2))
    return torch.cat(own, dim=-1)[None]


@kernel(any_number=1)
def _unpack(gathered: torch.Tensor, total: torch.Tensor, *, sections: Sections) -> None:
    """All ranks' rows, [w, tokens, n], as channels, into [1, tokens, C]."""
    rows_by_section = _by_section(gathered, sections, [section.sum_bits for section in sections], len(gathered))
    for rows, section, into in zip(rows_by_section, sections, split(total[0], sections), strict=True):
        into.copy_(unpack_sum(_from_ranks(rows, _groups(section)), section.sum_bits, section.channels, total.dtype))


def _for_ranks(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Each rank's share of the groups, [..., G, n] -> [w, ..., share, n]; a smaller share ends in zeros."""
    shares = shares_of(rows.shape[-2], ranks)
    if rows.shape[-2] % ranks == 0:
        return rows.unflatten(-2, (ranks, -1)).movedim(-3, 0)
    widest = max(share.stop - share.start for share in shares)
    own = [rows[..., share, :] for share in shares]
    return torch.stack([pad(each, (0, 0, 0, widest - each.shape[-2])) for each in own])


def _from_ranks(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """The inverse: [w, ..., share, n] -> [..., G, n]."""
    if groups % len(rows) == 0:
        return rows.movedim(0, -3).flatten(-3, -2)
    shares = shares_of(groups, len(rows))
    return torch.cat([own[..., : share.stop - share.start, :] for own, share in zip(rows, shares, strict=True)], dim=-2)


def _by_section(rows: torch.Tensor, sections: Sections, bits: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """A rank's share of each section: [..., n] -> [..., share, bytes of a group]."""
    shares = [-(-_groups(section) // ranks) for section in sections]  # the widest
    sizes = [FORMATS[each].group_bytes() for each in bits]
    parts = rows.split([share * size for share, size in zip(shares, sizes, strict=True)], dim=-1)
    return [part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True)]


def _groups(section: Section) -> int:
    return -(-section.channels // GROUP)


@cache
def _side_stream(device: torch.device) -> SideStream:
    return SideStream(device)


# ---- bytes from every rank to every other, under way: each is to be read only after a wait for it ----
#
# NCCL has both. By those of gloo (torch 2.13) the two directions of a slow link take turns, as they do where a send is
# posted before a receive: an all-to-all takes twice its time, an all-gather half as much again. Here a rank is ready to
# receive before it sends.

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
