"""The size of a grid, as recipes and commands give it. Without torch."""

from __future__ import annotations

import math
import re
from typing import Any

from rewired.model.family import divisors_in_words
from rewired.model.payload import GROUP


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

    @property
    def x(self) -> int:
        return self // self.y

    @property
    def written(self) -> int | str:
        return f"{self.x}x{self.y}" if self.y > 1 else int(self)

    def __str__(self) -> str:
        return str(self.written)


def check(config: Any, size: TpSize) -> None:
    """Raise ValueError, with the numbers that would do, if a model of this RewiredConfig does not fit the grid."""
    shared = math.gcd(*config.family.divisible(config).values(), *[config.tp_shards] * config.depends_on_shards)
    if shared % size.x:
        shards = f" and tp_shards {config.tp_shards}" if config.depends_on_shards else ""
        raise ValueError(
            f"tp_size {size} splits {config.family.divisible_in_words(config)}{shards} over X = {size.x}: "
            f"choose an X of {divisors_in_words(shared)}."
        )
    modules, width = config.resolved_wiring.modules, config.hidden_size
    if any(module.leaves_channels or len(module.sections) > 1 for module in modules):
        raise ValueError(
            f"tp_size {size} splits the stream's channels over Y = {size.y}, and this wiring reduces the first ones "
            f"only, which few ranks would hold: take tp_size {size.x}, or another wiring."
        )
    unit = GROUP if any(module.sections for module in modules) else 1
    if width % (size.y * unit):
        of = f" in groups of {unit}" if unit > 1 else ""
        fitting = divisors_in_words(width // unit if width % unit == 0 else 1)
        raise ValueError(f"tp_size {size} splits hidden_size {width}{of} over Y = {size.y}: choose a Y of {fitting}.")
