"""A training step's time for each wiring: forward, backward, and what is waited for of all-reduces and of weights.

Backward computes twice what forward does. It reduces gradients where forward reduces activations, and hides the same
all-reduces behind the same modules; of the others, those of gradients hide behind the products of weights' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewired.checkpoint.shape import Shape
from rewired.model.wiring import Wiring
from rewired.tables import new_table

from .all_reduce_time import AllReduce
from .compute import Rank, Step
from .grids import Grid
from .machine import serving_machine
from .wirings import RANKED, candidates

TRAINED = tuple(text for text in RANKED if "int" not in text)
CAVEAT = (
    "Steps compute activations again that were not stored, send 16 bits, and hide FSDP's weights behind compute. "
    "Trust the ratios more than the times: docs/plan-checks.md says how far off they were."
)
_ITEM = 2  # bytes of a 16-bit number, which payload_bytes counts


@dataclass(frozen=True)
class TrainingStep:
    """Seconds."""

    compute: float
    activations: float  # waited for
    weights: float  # waited for: FSDP's, and gradients over replicas

    @property
    def seconds(self) -> float:
        return self.compute + self.activations + self.weights


@dataclass(frozen=True)
class PricedStep:
    name: str
    step: TrainingStep
    speedup: float  # over standard


def price_steps(
    shape: Shape,
    hardware: str,
    gpus_per_node: int,
    grid: Grid,
    batch: int,
    tokens: int,
    texts: Sequence[str] | None,
) -> list[PricedStep]:
    """Best first, on a grid that recomputes activations. Raises ValueError for wirings that cannot be priced."""
    machine = serving_machine(hardware, "nccl", grid.tp, gpus_per_node=gpus_per_node)
    rank, step = machine.rank(shape), Step(batch // (grid.fsdp * grid.replicate), tokens, tokens)
    steps = {}
    for each in candidates(shape, TRAINED if texts is None else texts):
        if any(module.sections for module in each.wiring.modules):
            raise ValueError(f"'{each.name}' sends quantised activations: a training is not priced with them.")
        took = training_step(rank, machine.all_reduce, each.wiring, step, each.communicates)
        exchange = grid.weights + grid.gradients
        waited = max(exchange - took.compute, (1 - machine.all_reduce.hide) * exchange)
        steps[each.name] = replace(took, weights=waited)
    standard = steps["standard"].seconds
    priced = [PricedStep(name, step, standard / step.seconds) for name, step in steps.items()]
    return sorted(priced, key=lambda row: -row.speedup)


def training_step(
    rank: Rank,
    all_reduce: AllReduce,
    wiring: Wiring,
    step: Step,
    communicates: bool = True,
    *,
    recomputes: bool = True,
) -> TrainingStep:
    """On one data-parallel rank; weights are not exchanged."""
    kinds = [kind for _ in wiring.layers for kind in rank.shape.family.modules]
    of_kind = {True: rank.attention(step), False: rank.mlp(step)}
    works = [of_kind[kind.is_attention] for kind in kinds]
    positions = replace(rank, engine=replace(rank.engine, logits_of_prompt=True))
    waited = 0.0
    for index, (kind, module) in enumerate(zip(kinds, wiring.modules, strict=True)):
        if not (communicates and module.launches):
            continue
        size = step.rows * module.payload_bytes(_ITEM)
        seconds, least = all_reduce.seconds(size, rank.tp), all_reduce.least_wait(size, rank.tp)
        behind = sum(works[index + 1 : index + 1 + max(1, module.hides_behind)])
        forward = max(seconds - behind, least) if module.overlapped else seconds
        backward = max(seconds - behind * (2 if module.overlapped else 1), least)
        # a layer that is computed again reduces again what its MLP reads
        waited += forward * (2 if recomputes and kind.is_attention else 1) + backward
    return TrainingStep((3 + recomputes) * sum(works) + 3 * positions.head(step), waited, 0.0)


def print_steps(rows: Sequence[PricedStep], grid: Grid) -> None:
    from rich.console import Console

    title = f"wirings on tp {grid.tp} x fsdp {grid.fsdp} x replicate {grid.replicate}, milliseconds"
    table = new_table(title, ["wiring", "step", "speedup", "compute", "activations", "weights"])
    for row in rows:
        seconds = row.step.compute, row.step.activations, row.step.weights
        cells = (f"{time * 1e3:.1f}" for time in seconds)
        table.add_row(row.name, f"{row.step.seconds * 1e3:.1f}", f"{row.speedup:.3f}", *cells)
    console = Console(markup=False)
    console.print(table)
    console.print(CAVEAT, soft_wrap=True, highlight=False)


def steps_json(rows: Sequence[PricedStep]) -> list[dict[str, Any]]:
    """Times in seconds."""
    return [{"wiring": row.name, "speedup": row.speedup, "seconds": row.step.seconds} for row in rows]
