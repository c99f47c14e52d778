"""A conversion at work: its source at hand, and what is to be made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rewired.checkpoint.checkpoint import Checkpoint, gain_names
from rewired.checkpoint.safetensors_header import TensorInfo
from rewired.checkpoint.tensors import OnBytes
from rewired.sources import Source

from .destination import check_space
from .plan import Plan
from .request import Request


@dataclass(frozen=True)
class Job:
    """What the steps that write share: the checkpoint, its tensors, and the plan for the folder `out`.

    `weights` is the checkpoint that has the tensors: the source's own or, where a step has changed them, one of ours.
    """

    source: Source
    checkpoint: Checkpoint
    weights: Checkpoint
    tensors: Mapping[str, TensorInfo]
    plan: Plan
    request: Request
    out: Path
    staging: Path  # where `out` is written
    on_bytes: OnBytes

    @property
    def files(self) -> dict[str, Path]:
        return {name: self.weights.folder / info.file for name, info in self.tensors.items()}

    @property
    def lost_gains(self) -> set[str]:
        """The tensors that are gains of modules which peek no more, or on other shards."""
        family, is_same = self.checkpoint.shape.family, self.plan.tp_shards == self.checkpoint.tp_shards
        return {*self.checkpoint.gains(self.tensors)} - {*(gain_names(family, self.plan.wiring) if is_same else ())}

    @property
    def scratch(self) -> Path:
        """For weights on their way, which nobody needs once the output has links to them."""
        return self.staging / ".scratch"

    def with_weights(self, what: str, needed: int, write: Callable[[Path], Checkpoint]) -> Job:
        """With the weights that `write` leaves in the scratch folder `what`. Raises ValueError if `needed` bytes do not
        fit."""
        check_space(self.out, needed)
        (self.scratch / what).mkdir(parents=True)
        weights = write(self.scratch / what)
        # files of our own are linked, not copied once more
        return replace(self, weights=weights, tensors=weights.tensors(), request=replace(self.request, copy=False))
