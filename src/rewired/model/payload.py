"""The payload of a reduction: how many bits of each channel it sends. Without torch.

`full` sends what there is. `int8` and `int4` quantise all channels, in groups of 64 that share a scale. A table gives
bits to shares of the channels, first channels first: `8:0.1,4:0.4,0:0.5`. Those of 0 bits are not sent, and stay local.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

GROUP = 64  # channels that share a scale
SCALE_BYTES = 2  # a bfloat16
FULL = "full"

Sections = tuple[tuple[int, int], ...]  # bits, and how many channels they are for; empty: all channels as they are

_TABLES = {"int8": ((8, 1.0),), "int4": ((4, 1.0),)}


def as_text(value: Any) -> Any:
    """A table that is given as a mapping, as it is kept; anything else itself."""
    return ",".join(f"{bits}:{share}" for bits, share in value.items()) if isinstance(value, Mapping) else value


def is_payload(value: Any) -> bool:
    if value == FULL or value in _TABLES:
        return True
    if not (isinstance(value, str) and re.fullmatch(r"[840]:[\d.]+(,[840]:[\d.]+)*", value)):
        return False
    try:
        bits, shares = zip(*_table(value), strict=True)
    except ValueError:  # two points in a number
        return False
    is_ordered = list(bits) == sorted(set(bits), reverse=True)
    return is_ordered and bits[0] > 0 and min(shares) > 0 and math.isclose(sum(shares), 1, abs_tol=1e-6)


def keeps_channels(payload: str) -> bool:
    """Whether some channels have 0 bits."""
    return payload != FULL and _table(payload)[-1][0] == 0


def make_sections(payload: str, channels: int, hidden_size: int, is_last: bool) -> Sections:
    """What a module sends that reduces the first `channels` of `hidden_size`.

    The last module of a region leaves nothing local: it sends channels of 0 bits, too, with the table's most bits.
    """
    if payload == FULL:
        return ()
    table = _table(payload)
    sections, start, share_so_far = list[tuple[int, int]](), 0, 0.0
    for bits, share in table:
        share_so_far += share
        end = hidden_size if (bits, share) == table[-1] else math.floor(round(share_so_far * hidden_size, 6))
        width = min(end, channels) - start
        bits = table[0][0] if is_last and bits == 0 else bits
        if width > 0 and bits > 0:
            sections.append((bits, width))
        start = end
    return tuple(sections)


def packed_bytes(sections: Sections) -> int:
    """Bytes of a token's channels: whole groups, each with its scale."""
    return sum(math.ceil(channels / GROUP) * (GROUP * bits // 8 + SCALE_BYTES) for bits, channels in sections)


def _table(payload: str) -> tuple[tuple[int, float], ...]:
    if payload in _TABLES:
        return _TABLES[payload]
    pairs = (item.split(":") for item in payload.split(","))
    return tuple((int(bits), float(share)) for bits, share in pairs)
