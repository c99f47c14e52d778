"""A recipe's `comm`: how weights and gradients travel between the ranks of FSDP2."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

from huggingface_hub.dataclasses import type_validator

from rewired.adapt.recipe.unknown import check_known

DIFFERENCES = "int4-difference"
_Quantised = Literal["int4", "int8", "bf16"]
_Schedule = _Quantised | Mapping[float, _Quantised]


@dataclass(frozen=True)
class Comm:
    """The keys of `comm`, each with its default.

    `weights` and `gradients` are how these cross nodes, `gradients_in_node` how gradients travel inside one. Weights
    may cross as differences to what nodes hold of them. How gradients travel may change in a training: a mapping says
    what does from which part of it on. They are reduced in `pipeline` chunks. With a `secondary_shard`, the ranks of a
    node keep what crossed until the weights change, as it is or in bf16. `hadamard` rotates gradients in groups of 128
    before they are quantised, and `error_feedback` adds to each what the earlier ones lost. Weights that are not
    trained are never quantised; gathered `once`, they cross nodes a single time. `ranks_per_node` is the launcher's
    number unless given.
    """

    weights: Literal["int8", "bf16", "int4-difference"] = "int8"
    gradients: _Schedule = "int4"
    gradients_in_node: _Schedule = "int8"
    pipeline: int = 1
    secondary_shard: Literal["node", "bf16", "none"] = "node"
    hadamard: bool = True
    error_feedback: bool = False
    gather_frozen: Literal["once", "each"] = "once"
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        for key, hint in get_type_hints(Comm).items():
            if hint != _Schedule:
                type_validator(key, getattr(self, key), hint)
        for key in ("gradients", "gradients_in_node"):
            schedule = _schedule(getattr(self, key))
            for value in schedule.values():
                type_validator(key, value, _Quantised)
            if 0 not in schedule or not all(isinstance(start, int | float) and 0 <= start < 1 for start in schedule):
                raise ValueError(
                    f"comm has {key} {schedule!r}: its keys are parts of the training, 0 first, all below 1: "
                    "{0: int4, 0.5: bf16}."
                )
        if self.pipeline < 1 or (self.ranks_per_node is not None and self.ranks_per_node < 1):
            raise ValueError("comm: pipeline and ranks_per_node are numbers above 0.")
        if self.weights == DIFFERENCES and self.secondary_shard == "none":
            raise ValueError(
                "comm has differences of weights, and a node keeps nothing that they could differ from: "
                "give secondary_shard node."
            )
        sent = {*_schedule(self.gradients).values(), *_schedule(self.gradients_in_node).values()}
        if sent == {"bf16"} and (self.hadamard or self.error_feedback):
            raise ValueError("comm has hadamard or error_feedback, and gradients that are not quantised: turn it off.")

    @classmethod
    def from_recipe(cls, value: Any) -> Comm:
        """The name of a preset, or a mapping with these fields. Raises ValueError for anything else."""
        if isinstance(value, str) and value in PRESETS:
            return PRESETS[value]
        if not isinstance(value, Mapping):
            raise ValueError(f"comm is {value!r}: give {', '.join(PRESETS)}, or a mapping of {', '.join(_names())}.")
        check_known(value, _names(), "comm has the unknown key")
        try:
            return cls(**value)
        except TypeError as error:
            raise ValueError(f"comm: {error}.") from None

    def node_size(self, fsdp_size: int, tp_size: int = 1) -> int:
        """How many of the ranks that shard a model are on a node, where `tp_size` ranks share each layer.

        Raises ValueError where a replica does not make whole nodes, nor a node whole replicas, or such ranks neither.
        """
        ranks = fsdp_size * tp_size
        on_node = self.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        if _is_cut(on_node, ranks) or _is_cut(on_node, tp_size):
            shared = f", of which {tp_size} share a layer," if tp_size > 1 else ""
            raise ValueError(
                f"{ranks} ranks{shared} do not make nodes of {on_node}: give another ranks_per_node in comm."
            )
        return max(1, min(on_node, ranks) // tp_size)

    def hops(self, done: float) -> tuple[str, str]:
        """How gradients travel inside a node, and between nodes, once so much of the training is done."""
        return _at(done, self.gradients_in_node), _at(done, self.gradients)


def _schedule(value: _Schedule) -> Mapping[float, str]:
    return value if isinstance(value, Mapping) else {0: value}


def _at(done: float, value: _Schedule) -> str:
    starts = _schedule(value)
    return starts[max(start for start in starts if start <= done)]


def _is_cut(one: int, other: int) -> bool:
    """Whether neither divides the other."""
    return max(one, other) % min(one, other) > 0


def _names() -> list[str]:
    return [one.name for one in fields(Comm)]


PRESETS = {
    "slow-link": Comm(),
    "zero++": Comm(gradients_in_node="int4", pipeline=2, secondary_shard="bf16", hadamard=False),  # arXiv 2306.10209
}
