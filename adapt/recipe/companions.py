"""Companions: what rooms that `adapt` does not know do beside a training.

A room announces one as an entry point of the group `rewired.adapt`: a dataclass whose fields, all of them optional, are
keys of recipes and of the command line. It raises ValueError for values that make no sense.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

import torch
from trl import SFTConfig

if TYPE_CHECKING:
    from .keys import Recipe


class Attached(Protocol):
    """A companion on one rank of a sharded training."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Called once, before the first step."""

    def at(self, done: float) -> None:
        """Called before each step, with the part of the training that is done."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps for this rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called on all ranks."""


class Companion(Protocol):
    """The keys of one companion, as a recipe gives them."""

    def check(self, recipe: Recipe, config: SFTConfig) -> None:
        """Raise ValueError for what makes no sense beside the recipe, or on the nodes that were launched."""

    def memory(self, recipe: Recipe, model: Any, dtype: torch.dtype, teacher: float) -> dict[str, float]:
        """Bytes of what it keeps on a device, by names, for a `model` in `dtype`; a device's part of the original has
        `teacher`."""

    def attach(self, recipe: Recipe, student: Any, teacher: Any | None) -> Attached | None:
        """Called on all ranks, once the models are there; None where the keys ask for nothing."""


@cache
def announced() -> tuple[type, ...]:
    return tuple(entry.load() for entry in sorted(entry_points(group="rewired.adapt"), key=lambda each: each.name))
