"""A reduction of quantised parts over the ranks: all-to-all, sum, all-gather.

Each rank adds up an equal part of the groups of channels. It receives every shard's packed part of them, sums these in
float32, quantises the sum, and sends that back to all. So the sum does not depend on how shards lie on ranks: it is,
bit for bit, `quantised_sum` of the same parts, and so is what rounding leaves to each shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from .exchange import Exchange
from .kernels import kernel
from .payload import FORMATS, GROUP, Section, Sections, shares_of
from .quantisation import QuantisedSum, add_up, deal_out, pack_parts, split, unpack_sum


class RankReduction(Exchange):
    """The reduction of all ranks' parts, of which this one holds [held, B, T, C]."""

    @torch.no_grad()
    def __init__(self, parts: torch.Tensor, sections: Sections, group: str) -> None:
        super().__init__(parts.new_empty(parts.shape[1:]), group)
        self.sections, self.left_of_sum = sections, parts.new_empty(parts.shape)
        self.sent, left = _pack(parts.flatten(1, -2), sections=sections, ranks=self.group.size())
        self.left = left.view(parts.shape)

    @property
    def outcome(self) -> QuantisedSum:
        return QuantisedSum(self.total, self.left, self.left_of_sum)

    def sum_received(self, received: torch.Tensor) -> torch.Tensor:
        left_of_sum = self.left_of_sum.flatten(1, -2)
        ranks, rank = self.group.size(), self.group.rank()
        return _add_up(received.flatten(0, 1), left_of_sum, sections=self.sections, ranks=ranks, rank=rank)[0]

    def fill_total(self, gathered: torch.Tensor) -> None:
        _unpack(gathered, self.total.flatten(0, -2)[None], sections=self.sections)


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
