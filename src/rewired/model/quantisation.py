"""Quantisation of what a reduction sends: symmetric, with a scale for each token and group of 64 channels.

A group x becomes whole numbers q from -m to m, m = 2^(bits - 1) - 1, and a scale s, max |x| / m in bfloat16:
q = round(x / s), and x is about s q. Packed, a group is a row of bytes: its numbers, then its scale. What rounding
leaves, x - s q, is kept: it goes along with the next reduction.

Large intermediates are made once and changed in place: on a CPU a new one costs its pages, many times the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .kernels import kernel
from .payload import FORMATS, GROUP, SCALE_BYTES, Section, Sections, shares_of


class QuantisedSum(NamedTuple):
    """A quantised sum, and what rounding leaves of it to each shard, which is zero where another shard adds up."""

    total: torch.Tensor  # [B, T, C]
    left: torch.Tensor  # [r, B, T, C], of the shard's own part
    left_of_sum: torch.Tensor  # [r, B, T, C], of the sum of the groups that the shard adds up


def quantised_sum(parts: torch.Tensor, sections: Sections) -> QuantisedSum:
    """The sum of the shards' quantised parts, [r, B, T, C], quantised, in the dtype of `parts`.

    What is not a matter of bits is in float32, or in float64 where `parts` are.
    """
    total, left, left_of_sum = _sum_sections(parts.flatten(1, -2), sections=sections)
    return QuantisedSum(total.view(parts.shape[1:]), left.view(parts.shape), left_of_sum.view(parts.shape))


@kernel(any_number=1)
def _sum_sections(parts: torch.Tensor, *, sections: Sections) -> QuantisedSum:
    """The same, of [r, tokens, C]."""
    found = [_sum_section(part, section) for part, section in zip(split(parts, sections), sections, strict=True)]
    return QuantisedSum(*(torch.cat(each, dim=-1).to(parts.dtype) for each in zip(*found, strict=True)))


def _sum_section(part: torch.Tensor, section: Section) -> QuantisedSum:
    groups = in_groups(part)
    rounded = _rounded(groups, section.bits)
    exact = sum_in_order(rounded)
    sent = _rounded(exact, section.sum_bits)
    left_of_sum = torch.zeros_like(part, dtype=groups.dtype)
    deal_out(exact - sent, shares_of(groups.shape[-2], len(part)), left_of_sum)
    total, left = (_in_channels(each, section.channels) for each in (sent, groups - rounded))
    return QuantisedSum(total, left, left_of_sum)


def split(tensor: torch.Tensor, sections: Sections) -> tuple[torch.Tensor, ...]:
    """The channels of each section."""
    return tensor.split([section.channels for section in sections], dim=-1)


def in_groups(tensor: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [..., ceil(C / 64), 64], in float32 or more; a last group that is not full ends in zeros."""
    widened = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return pad(widened, (0, -tensor.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def deal_out(groups: torch.Tensor, shares: Sequence[slice], into: torch.Tensor) -> None:
    """Give each shard its share of `groups`, which are those of the shares together: [..., G, 64] to [r, ..., C]."""
    first = shares[0].start
    for shard, share in zip(into, shares, strict=True):
        own = shard[..., GROUP * share.start : GROUP * share.stop]
        own.copy_(_in_channels(groups[..., share.start - first : share.stop - first, :], own.shape[-1]))


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """[r, ...] -> [...], one after the other: a device's own order of sums depends on the device."""
    return reduce(torch.add, parts)


def pack_parts(parts: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shards' parts, [..., C], as rows of bytes, [..., G, n], and what rounding leaves of them, [..., C]."""
    rows, left = _pack_and_keep(in_groups(parts), bits)
    return rows, _in_channels(left, parts.shape[-1]).to(parts.dtype)


def add_up(rows: torch.Tensor, bits: int, sum_bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of shards' rows, [r, ..., n], as rows, [..., n'], and what rounding leaves of it, [..., 64]."""
    return _pack_and_keep(sum_in_order(unpack(rows, bits, dtype)), sum_bits)


def unpack_sum(rows: torch.Tensor, bits: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows as channels: [..., G, n] -> [..., C], in `dtype`."""
    return _in_channels(unpack(rows, bits, torch.promote_types(dtype, torch.float32)), channels).to(dtype)


def pack(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Groups of n channels, [..., n] -> [..., n * bits / 8 + 2], bytes."""
    return _packed(*_quantise(groups, bits), bits)


def unpack(rows: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """What `pack` packed, as numbers of `dtype`: [..., n * bits / 8 + 2] -> [..., n]."""
    numbers, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    widths, channels = FORMATS[bits].widths, numbers.shape[-1] * 8 // bits
    fields = map(_apart, numbers.split([channels * width // 8 for width in widths], dim=-1), widths)
    codes = reduce(torch.bitwise_or, (field << sum(widths[:k]) if k else field for k, field in enumerate(fields)))
    whole = codes.view(torch.int8).to(dtype).sub_(FORMATS[bits].offset)
    return whole.mul_(_scale_of(scales).to(dtype))


def _packed(numbers: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers, [..., n], and their scales, [..., 1], as bytes."""
    codes = numbers.to(torch.int8).add_(FORMATS[bits].offset).view(torch.uint8)
    rows: list[torch.Tensor] = []  # `list[torch.Tensor]()` would break a compiler's graph
    *lower, highest = FORMATS[bits].widths
    for width in lower:
        rows.append(_side_by_side(codes & (1 << width) - 1, width))
        codes = codes >> width
    # torch 2.11's compiler lays out a last dimension of one so that no bytes can be seen in it
    scale_bytes = scales.squeeze(-1).view(torch.uint8).unflatten(-1, (-1, SCALE_BYTES))
    return torch.cat([*rows, _side_by_side(codes, highest), scale_bytes], dim=-1)


def _scale_of(row: torch.Tensor) -> torch.Tensor:
    """The bfloat16 of two bytes, in float32: [..., 2] -> [..., 1]. By arithmetic, which a compiler fuses."""
    low, high = row.to(torch.int32).chunk(SCALE_BYTES, dim=-1)
    return (high << 24 | low << 16).view(torch.float32)


def _side_by_side(field: torch.Tensor, width: int) -> torch.Tensor:
    """As many numbers a byte as there fit, the first of equal parts of the group lowest."""
    parts = field.chunk(8 // width, dim=-1)
    return reduce(torch.bitwise_or, (part << width * k if k else part for k, part in enumerate(parts)))


def _apart(row: torch.Tensor, width: int) -> torch.Tensor:
    """The inverse of `_side_by_side`."""
    if width == 8:
        return row
    return torch.cat([(row >> shift).bitwise_and_((1 << width) - 1) for shift in range(0, 8, width)], dim=-1)


def _pack_and_keep(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `pack` does, and what rounding leaves, [..., n]."""
    numbers, scales = _quantise(groups, bits)
    return _packed(numbers, scales, bits), groups - numbers.mul_(scales.to(groups.dtype))


def _quantise(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., n] -> whole numbers, and bfloat16 scales, [..., 1]. One inf or NaN makes its whole group non-finite."""
    most = FORMATS[bits].most
    # GPUs divide by a constant by multiplying with its reciprocal; in float64 that, too, is the quotient in float32
    scales = (groups.abs().amax(-1, keepdim=True).double() / most).to(groups.dtype).to(torch.bfloat16)
    divisors = torch.where(scales == 0, 1.0, scales.to(groups.dtype))
    return (groups / divisors).round_().clamp_(-most, most), scales


def _in_channels(groups: torch.Tensor, channels: int) -> torch.Tensor:
    """The inverse of `in_groups`: [..., G, 64] -> [..., C].

    Not a slice of all channels: Inductor (torch 2.13), for a CPU, loses the tail of such a loop, which it splits by 64.
    """
    whole, rest = divmod(channels, GROUP)
    full = groups[..., :whole, :].flatten(-2)
    return torch.cat([full, groups[..., whole, :rest]], dim=-1) if rest else full


def _rounded(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """`groups` packed and unpacked."""
    numbers, scales = _quantise(groups, bits)
    return numbers.mul_(scales.to(groups.dtype))
