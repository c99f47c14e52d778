"""A conversion at work: its source at hand, and what is to be made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rewired.checkpoint.checkpoint import Checkpoint, gain_names
from rewired.checkpoint.safetensors_header import TensorInfo
from rewired.sources import Source

from .plan import Plan
from .request import Request

OnBytes = Callable[[int, int], None]  # hears how many bytes more of weights are written, and of how many in all


@dataclass(frozen=True)
class Job:
    """What the steps that write share: the checkpoint, its tensors, and the plan for the folder `out`.

    `weights` is the checkpoint that has the tensors: the source's own or, where they were rotated, one of ours.
    """

    source: Source
    checkpoint: Checkpoint
    weights: Checkpoint
    tensors: Mapping[str, TensorInfo]
    plan: Plan
    request: Request
    out: Path

    @property
    def files(self) -> dict[str, Path]:
        """The file of every tensor."""
        return {name: self.weights.folder / info.file for name, info in self.tensors.items()}

    @property
    def lost_gains(self) -> set[str]:
        """The tensors that are gains of modules which peek no more, or on other shards."""
        family, is_same = self.checkpoint.shape.family, self.plan.tp_shards == self.checkpoint.tp_shards
        return {*self.checkpoint.gains(self.tensors)} - {*(gain_names(family, self.plan.wiring) if is_same else ())}
