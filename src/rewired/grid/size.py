"""The size of a grid, as recipes and commands give it. Without torch."""

from __future__ import annotations

import math
import re
from typing import Any

from rewired.model.family import divisors_in_words
from rewired.model.payload import GROUP, shares_of


class TpSize(int):
    """How many ranks share each layer's work. Of a grid it also knows the sides: `2x3` is 6, X 2 and Y 3.

    A number, so that whoever only counts ranks, and every checkpoint, does not see the grid.
    """

    y = 1

    @classmethod
    def parse(cls, text: str, name: str = "tp_size") -> TpSize:
        """`4`, or `2x2`. Raises ValueError, which calls it `name`."""
        match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", str(text).strip())
        if match is None:
            raise ValueError(f"{name} is '{text}': give a number of ranks, or a grid of X x Y, such as 2x2.")
        y = int(match[2] or 1)
        size = cls(int(match[1]) * y)
        if y > 1:
            size.y = y
        return size

    @classmethod
    def of(cls, ranks: int) -> TpSize:
        """A number of ranks as a size, which it may be already."""
        return ranks if isinstance(ranks, cls) else cls(ranks)

    @property
    def x(self) -> int:
        return self // self.y

    @property
    def written(self) -> int | str:
        return f"{self.x}x{self.y}" if self.y > 1 else int(self)

    def __str__(self) -> str:
        return str(self.written)


def check(config: Any, size: TpSize, fsdp_size: int = 1, name: str = "tp_size") -> None:
    """Raise ValueError, with the numbers that would do, if a model of this RewiredConfig does not fit the grid, which
    the user knows as `name`."""
    shared = math.gcd(*config.family.divisible(config).values(), *[config.tp_shards] * config.depends_on_shards)
    if shared % size.x:
        shards = f" and tp_shards {config.tp_shards}" if config.depends_on_shards else ""
        raise ValueError(
            f"{name} {size} splits {config.family.divisible_in_words(config)}{shards} over X = {size.x}: "
            f"choose an X of {divisors_in_words(shared)}."
        )
    hidden_size, blocks = config.hidden_size, blocks_of(config, fsdp_size)
    unit = GROUP if any(each.sections for each in config.resolved_wiring.modules) else 1
    units, rest = divmod(hidden_size, blocks * unit)
    if rest or units % size.y:
        parts = [f"{blocks} blocks of {hidden_size / blocks:g}"] * (blocks > 1) + [f"groups of {unit}"] * (unit > 1)
        what = ", in ".join([f"hidden_size {hidden_size}", *parts])
        beside = f" with fsdp_size {fsdp_size}" if blocks > 1 and fsdp_size > 1 else ""
        fitting = divisors_in_words(1 if rest else units)
        raise ValueError(f"{name} {size}{beside} splits {what} over Y = {size.y}: choose a Y of {fitting}.")


def blocks_of(config: Any, fsdp_size: int = 1) -> int:
    """How many equal blocks of channels there are, so that the wiring treats all channels of a block alike.

    Y splits each block. So every rank holds its part of the channels that are reduced, and of those that stay local; of
    each of a payload's sections; and of the groups that one shard adds up, which keeps what rounding leaves of the sum.

    FSDP2 shares several blocks out over its ranks, so their number is a multiple of `fsdp_size`.
    """
    ends = {0}
    for module in config.resolved_wiring.modules:
        ends.add(module.shared_channels)
        start = 0
        for section in module.sections:
            shares = shares_of(-(-section.channels // GROUP), config.tp_shards)
            ends |= {start + min(GROUP * share.stop, section.channels) for share in shares}
            start += section.channels
    blocks = config.hidden_size // math.gcd(config.hidden_size, *ends)
    return math.lcm(blocks, fsdp_size) if blocks > 1 else 1
