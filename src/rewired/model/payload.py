"""The payload of a reduction: how many bits of each channel it sends. Without torch.

`full` sends what there is. `int8`, `int6` and `int4` quantise all channels, in groups of 64 that share a scale;
`int4/int8` sends parts of 4 bits, and their sum back in 8. A table gives bits to shares of the channels, first channels
first: `8:0.1,4/8:0.4,0:0.5`. Those of 0 bits are not sent, and stay local.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

GROUP = 64  # channels that share a scale
SCALE_BYTES = 2  # a bfloat16
FULL = "full"
OF_LAST_MODULE = "int8"  # of the model, where any is quantised: nothing takes along what its rounding leaves


class Format(NamedTuple):
    """How whole numbers of some bits are sent: cut into fields that divide a byte, lowest bits first.

    The fields of a width, of all numbers of a group, fill bytes of their own.
    """

    bits: int
    widths: tuple[int, ...]

    @property
    def most(self) -> int:
        """Numbers are between this and its negative."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def offset(self) -> int:
        """What makes numbers positive where they are cut; a whole byte has a sign of its own."""
        return 0 if self.bits == 8 else 1 << self.bits - 1

    def group_bytes(self, channels: int = GROUP) -> int:
        """Bytes of a group: its numbers, and its scale."""
        return channels * self.bits // 8 + SCALE_BYTES


FORMATS = {each.bits: each for each in (Format(8, (8,)), Format(6, (4, 2)), Format(4, (4,)))}
NAMES = tuple(f"int{bits}" for bits in FORMATS)  # of payloads that send all channels alike


class Section(NamedTuple):
    """Channels in a row that are sent alike."""

    bits: int  # of each shard's part
    sum_bits: int  # of the sum
    channels: int


Sections = tuple[Section, ...]  # of a reduction; empty: all channels as they are
_Row = tuple[int, int, float]  # bits of the parts and of the sum, and for which share of the channels

_BITS = "|".join(map(str, FORMATS))
_NAME = re.compile(rf"int({_BITS})(?:/int({_BITS}))?")
_ITEM = re.compile(rf"(?:({_BITS})(?:/({_BITS}))?|0):(\d+(?:\.\d*)?|\.\d+)")


def as_text(value: Any) -> Any:
    """A table that is given as a mapping, as it is kept; anything else itself."""
    return ",".join(f"{bits}:{share}" for bits, share in value.items()) if isinstance(value, Mapping) else value


def is_payload(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    if value == FULL or _NAME.fullmatch(value):
        return True
    if not all(_ITEM.fullmatch(item) for item in value.split(",")):
        return False
    rows = _table(value)
    bits, shares = [row[:2] for row in rows], [row[2] for row in rows]
    is_ordered = bits == sorted(set(bits), reverse=True)
    return is_ordered and bits[0] > (0, 0) and min(shares) > 0 and math.isclose(sum(shares), 1, abs_tol=1e-6)


def keeps_channels(payload: str) -> bool:
    """Whether some channels have 0 bits."""
    return payload != FULL and _table(payload)[-1][0] == 0


def make_sections(payload: str, channels: int, hidden_size: int, is_last: bool) -> Sections:
    """What a module sends that reduces the first `channels` of `hidden_size`.

    The last module of a region leaves no channel local: it sends those of 0 bits, too, with the table's most bits.
    """
    if payload == FULL:
        return ()
    table = _table(payload)
    sections, start, share_so_far = list[Section](), 0, 0.0
    for row in table:
        bits, sum_bits, _ = table[0] if is_last and row[0] == 0 else row
        share_so_far += row[2]
        end = hidden_size if row == table[-1] else math.floor(round(share_so_far * hidden_size, 6))
        width = min(end, channels) - start
        if width > 0 and bits > 0:
            sections.append(Section(bits, sum_bits, width))
        start = end
    return tuple(sections)


def shares_of(groups: int, shards: int) -> list[slice]:
    """Which groups each shard, or rank, adds up: as equal parts as there can be, in order."""
    bounds = [-(-shard * groups // shards) for shard in range(shards + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def packed_bytes(sections: Sections) -> int:
    """Bytes of a token's channels: whole groups, each with its scale; the mean of the parts' bytes and of the sum's.

    Two times (r - 1) / r of that is what one of r ranks sends, as of the bytes of a ring all-reduce.
    """
    groups = [math.ceil(section.channels / GROUP) for section in sections]
    both = [sum(FORMATS[bits].group_bytes() for bits in (section.bits, section.sum_bits)) for section in sections]
    return sum(number * size // 2 for number, size in zip(groups, both, strict=True))


def _table(payload: str) -> tuple[_Row, ...]:
    if name := _NAME.fullmatch(payload):
        return ((int(name[1]), int(name[2] or name[1]), 1.0),)
    items = (_ITEM.fullmatch(item) for item in payload.split(","))
    return tuple((int(item[1] or 0), int(item[2] or item[1] or 0), float(item[3])) for item in items if item)
