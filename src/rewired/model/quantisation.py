"""Quantisation of what ranks send each other: symmetric, with a scale for each group of numbers.

Of a reduction a group is 64 channels of a token; adapt's comm has groups of its own.

A group x becomes whole numbers q from -m to m, m = 2^(bits - 1) - 1, and a scale s, max |x| / m in bfloat16:
q = round(x / s), and x is about s q. Packed, a group is a row of bytes: its numbers, then its scale.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .payload import GROUP, SCALE_BYTES, Sections


def quantised_sum(parts: torch.Tensor, sections: Sections) -> torch.Tensor:
    """The sum of the shards' quantised parts, quantised: [r, B, T, C] -> [B, T, C], in the dtype of `parts`.

    What is not a matter of bits is in float32, or in float64 where `parts` are.
    """
    sums = []
    for (bits, channels), part in zip(sections, split(parts, sections), strict=True):
        total = _rounded(in_groups(part), bits).sum(0)
        sums.append(_rounded(total, bits).flatten(-2)[..., :channels])
    return torch.cat(sums, dim=-1).to(parts.dtype)


def split(tensor: torch.Tensor, sections: Sections) -> tuple[torch.Tensor, ...]:
    """The channels of each section."""
    return tensor.split([channels for _, channels in sections], dim=-1)


def in_groups(tensor: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """[..., C] -> [..., ceil(C / group), group], in float32 or more; a last group that is not full ends in zeros."""
    widened = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return pad(widened, (0, -tensor.shape[-1] % group)).unflatten(-1, (-1, group))


def pack(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., group] -> [..., group * bits / 8 + 2], bytes; of 4 bits, two numbers a byte."""
    numbers, scales = _quantise(groups, bits)
    if bits == 8:
        packed = numbers.to(torch.int8).view(torch.uint8)
    else:
        shifted = (numbers + 8).to(torch.uint8)  # 1 to 15
        packed = shifted[..., ::2] | shifted[..., 1::2] << 4
    return torch.cat([packed, scales.view(torch.uint8)], dim=-1)


def unpack(rows: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """What `pack` packed, as numbers of `dtype`: [..., group * bits / 8 + 2] -> [..., group]."""
    packed, scales = rows.split([rows.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    if bits == 8:
        numbers = packed.contiguous().view(torch.int8).to(dtype)
    else:
        numbers = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).to(dtype) - 8
    return numbers * scales.contiguous().view(torch.bfloat16).to(dtype)


def _quantise(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., group] -> whole numbers, and bfloat16 scales, [..., 1]. Of a group with inf or NaN nothing stays finite."""
    most = 2 ** (bits - 1) - 1
    scales = (groups.abs().amax(-1, keepdim=True) / most).to(torch.bfloat16)
    divisors = torch.where(scales == 0, 1.0, scales.to(groups.dtype))
    return (groups / divisors).round().clamp(-most, most), scales


def _rounded(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """`groups` packed and unpacked."""
    numbers, scales = _quantise(groups, bits)
    return numbers * scales.to(groups.dtype)
