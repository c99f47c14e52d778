"""The recipe's key `comm`: `adapt` finds it as an entry point of the group `rewired.adapt`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from trl import SFTConfig

from rewired.adapt.recipe.keys import LORA, Recipe

from .communication import Communication
from .late_gradients import compute_late
from .memory import kept_bytes
from .nodes import Nodes
from .options import Comm


@dataclass
class CommKeys:
    """Raises ValueError for values that make no sense."""

    comm: dict | None = field(  # type: ignore[type-arg]
        default=None,
        metadata={"help": "How FSDP2 sends weights and gradients over slow networks: slow-link, zero++, or a mapping."},
    )

    def __post_init__(self) -> None:
        _ = self.options

    @cached_property
    def options(self) -> Comm | None:
        """What `comm` says, if it is given."""
        return None if self.comm is None else Comm.from_recipe(self.comm)

    def check(self, recipe: Recipe, config: SFTConfig) -> None:
        if (options := self.options) is None:
            return
        if recipe.train == LORA:
            raise ValueError("comm does not send adapters: leave comm out, or train all weights.")
        if recipe.fsdp_size == 1:
            raise ValueError("comm is how FSDP2 sends weights and gradients: give fsdp_size, too.")
        if config.fp16:
            raise ValueError(
                "fp16 scales the loss until gradients overflow, and with comm one that does makes a whole block of "
                "them no numbers: give bf16."
            )
        options.node_size(recipe.fsdp_size, recipe.tp_size)

    def memory(self, recipe: Recipe, model: Any, dtype: torch.dtype, teacher: float) -> dict[str, float]:
        return kept_bytes(self.options, recipe, model, dtype.itemsize, teacher) if self.options else {}

    def attach(self, recipe: Recipe, student: Any, teacher: Any | None) -> Communication | None:
        """What sends the student's weights and gradients in the place of FSDP2's own, and the teacher's weights.

        Under tensor parallelism, which sends none of these, the student's layers compute weight gradients late.
        """
        if recipe.tp_size > 1:
            compute_late(student)
        if (options := self.options) is None:
            return None
        size = options.node_size(recipe.fsdp_size, recipe.tp_size)
        nodes = Nodes.of(size, student.device.type, recipe.dp_replicate_size, recipe.tp_size)
        if teacher is not None:
            Communication(teacher, options, nodes)
        return Communication(student, options, nodes)
