"""The time of a forward pass: one walk over a wiring's modules, whatever the wiring.

A collective that nothing hides is waited for whole. One that runs behind the next module's compute w is waited for
max(c - w, (1 - hide) c) of its time c.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rewired.model.presets import PRESETS
from rewired.model.wiring import ModuleWiring, Wiring

from .all_reduce_time import AllReduce
from .compute import Rank, Step

_ITEM = 2  # bytes of a 16-bit number


@dataclass(frozen=True)
class PassTime:
    """Where the time of a forward pass goes, in seconds."""

    attention: float
    mlp: float
    head: float
    communication: float  # of all collectives, hidden or not
    waited: float  # the part of it that compute waits for

    @property
    def seconds(self) -> float:
        return self.attention + self.mlp + self.head + self.waited


def pass_time(rank: Rank, all_reduce: AllReduce, wiring: Wiring, step: Step, communicates: bool = True) -> PassTime:
    """Without `communicates`, of the same model without any collective: wrong outputs, and the bound of what is won."""
    attention, mlp = rank.attention(step), rank.mlp(step)
    works = [seconds for first, _ in wiring.layers for seconds in (attention - fused_saving(rank, first), mlp)]
    communication = waited = 0.0

    @cache  # a wiring has few sizes, and many modules
    def collective(size: float, is_quantised: bool) -> float:
        if is_quantised:
            return all_reduce.quantised_seconds(size, rank.tp) + rank.quantising(step)
        return all_reduce.seconds(size, rank.tp)

    for index, module in enumerate(wiring.modules):
        if not (communicates and module.launches):
            continue
        size = step.rows * module.payload_bytes(_ITEM)
        seconds = collective(size, bool(module.sections))
        communication += seconds
        waited += exposed(seconds, works[index + 1], rank.engine.hidden(size)) if module.overlapped else seconds
    return PassTime(sum(works[::2]), sum(works[1::2]), rank.head(step), communication, waited)


def exposed(collective: float, work: float, hide: float) -> float:
    """The seconds waited for of a collective behind `work` seconds of compute, which can hide a share of it."""
    return max(collective - work, (1 - hide) * collective)


def fused_saving(rank: Rank, module: ModuleWiring) -> float:
    """What an engine saves that computes as one module an attention and an MLP that run side by side."""
    return rank.engine.fused_saving if PRESETS[module.region.preset].whole_layers else 0.0
