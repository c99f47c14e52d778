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
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.functional import pad

from .payload import GROUP, Section, Sections
from .quantisation import Reduction, add_up, deal_out, pack_parts, shares_of, split, unpack_sum

_wait = torch.ops._c10d_functional.wait_tensor


def start_quantised_sum(parts: torch.Tensor, sections: Sections, group: str) -> Reduction:
    """The reduction of all ranks' parts, of which this one holds [held, B, T, C], under way.

    `total` is to be read only after a wait for it, and `left_of_sum` only after that.
    """
    reduction = RankReduction(parts, sections, group)
    reduction.start()
    _register_work(reduction.total, reduction)
    return reduction.outcome


class RankReduction(Work):
    """What a wait for `total` waits for.

    On a GPU all of it runs on a stream of its own, from the start on. Gloo has no such queue: there the all-to-all
    is under way from the start, and sum and all-gather run in the wait, in the same order on all ranks.
    """

    @torch.no_grad()
    def __init__(self, parts: torch.Tensor, sections: Sections, group: str) -> None:
        super().__init__()
        process_group = _resolve_process_group(group)  # type: ignore[arg-type]  # a str
        self.ranks, self.rank, self.held = process_group.size(), process_group.rank(), len(parts)
        self.sections, self.group = sections, group
        self.groups = [-(-section.channels // GROUP) for section in sections]
        self.total, self.left_of_sum = parts.new_empty(parts.shape[1:]), parts.new_zeros(parts.shape)
        self.event: torch.cuda.Event | None = None
        rows, left = zip(*map(self._pack, split(parts, sections), sections), strict=True)
        self.left = torch.cat(left, dim=-1)
        self.shapes = [each.shape for each in rows]
        self.sent = _joined(rows)  # kept, as all buffers are, until nobody can read it any more

    @property
    def outcome(self) -> Reduction:
        return Reduction(self.total, self.left, self.left_of_sum)

    def start(self) -> None:
        self.received = _all_to_all(self.sent, self.ranks, self.group)
        if self.total.is_cuda:
            stream = _side_stream(self.total.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._finish()
                self.event = stream.record_event()

    def run(self) -> torch.Tensor:
        """All of it at once."""
        self.start()
        self.wait()
        return self.total

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.event is None:
            self._finish()
        else:
            self.event.wait()
        return True

    def _pack(self, part: torch.Tensor, section: Section) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of bytes, [w, held, tokens, share, n], and what rounding leaves, [held, B, T, C]."""
        rows, left = pack_parts(part.flatten(1, -2), section.bits)
        return _for_ranks(rows, self.ranks), left.view(part.shape)

    @torch.no_grad()
    def _finish(self) -> None:
        received = _separated(_wait(self.received), self.shapes)
        dtype = torch.promote_types(self.total.dtype, torch.float32)
        rows, left = zip(
            *(
                add_up(each.flatten(0, 1), section.bits, section.sum_bits, dtype)
                for each, section in zip(received, self.sections, strict=True)
            ),
            strict=True,
        )
        self.own = _joined([each[None] for each in rows])
        self._keep(left)
        self.gathered = _wait(_all_gather(self.own, self.ranks, self.group))
        shapes = [torch.Size((self.ranks, *each.shape)) for each in rows]
        for each, groups, section, into in zip(
            _separated(self.gathered, shapes), self.groups, self.sections, split(self.total, self.sections), strict=True
        ):
            rows_of_all = _from_ranks(each, groups)
            total = unpack_sum(rows_of_all, section.sum_bits, section.channels, self.total.dtype)
            into.copy_(total.view(into.shape))

    def _keep(self, left: Sequence[torch.Tensor]) -> None:
        """What rounding leaves of the sums that this rank made, for the shards that it holds."""
        held = slice(self.rank * self.held, (self.rank + 1) * self.held)
        for each, groups, into in zip(left, self.groups, split(self.left_of_sum, self.sections), strict=True):
            deal_out(
                each.view(*into.shape[1:-1], *each.shape[1:]), shares_of(groups, self.ranks * self.held)[held], into
            )


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
    shares = shares_of(groups, len(rows))
    return torch.cat([own[..., : share.stop - share.start, :] for own, share in zip(rows, shares, strict=True)], dim=-2)


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all sections in one: each [w, ...] -> [w, bytes]."""
    return torch.cat([each.flatten(1) for each in rows], dim=1)


def _separated(joined: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """The inverse, where the first dimension of `joined` may be flat."""
    rows = joined.view(shapes[0][0], -1).split([shape[1:].numel() for shape in shapes], dim=1)
    return [each.unflatten(1, shape[1:]) for each, shape in zip(rows, shapes, strict=True)]


def _all_to_all(packed: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Row k of every rank's `packed` to rank k."""
    return torch.ops._c10d_functional.all_to_all_single(packed, [1] * ranks, [1] * ranks, group)


def _all_gather(packed: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return torch.ops._c10d_functional.all_gather_into_tensor(packed, ranks, group)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
