"""The time of a forward pass: one walk over a wiring's modules, whatever the wiring.

Collectives follow one another on the link. Whoever needs one, a time w after it was launched, waits until it is done:
for all of its time c where nothing hides it, else for c - w, if the link was free, but at least for (1 - hide) c.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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

    @cache  # a wiring has few sizes, and many modules
    def collective(size: float, is_quantised: bool) -> float:
        if is_quantised:
            return all_reduce.quantised_seconds(size, rank.tp) + rank.quantising(step)
        return all_reduce.seconds(size, rank.tp)

    timeline = Timeline()
    for module, work in zip(wiring.modules, works, strict=True):
        timeline.wait(module.late)
        timeline.compute(work)
        timeline.wait(module.keeps)
        if communicates and module.launches:
            size = step.rows * module.payload_bytes(_ITEM)
            timeline.launch(collective(size, bool(module.sections)), rank.engine.hidden(size))
    timeline.wait(0)
    return PassTime(sum(works[::2]), sum(works[1::2]), rank.head(step), timeline.communication, timeline.waited)


@dataclass
class Timeline:
    """Of a rank that computes, launches collectives, and waits for them, in seconds."""

    now: float = 0.0
    waited: float = 0.0
    communication: float = 0.0
    link_is_free: float = 0.0  # from then on
    in_flight: list[tuple[float, float]] = field(
        default_factory=list
    )  # when each is done, its least wait; oldest first

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, seconds: float, hide: float) -> None:
        """Start a collective, of which compute can hide a share."""
        self.communication += seconds
        self.link_is_free = max(self.now, self.link_is_free) + seconds
        self.in_flight.append((self.link_is_free, (1 - hide) * seconds))

    def wait(self, leaving: int) -> None:
        """Until all are done but the newest `leaving`."""
        while len(self.in_flight) > leaving:
            done, least = self.in_flight.pop(0)
            seconds = max(done - self.now, least)
            self.waited += seconds
            self.now += seconds


def fused_saving(rank: Rank, module: ModuleWiring) -> float:
    """What an engine saves that computes as one module an attention and an MLP that run side by side."""
    return rank.engine.fused_saving if PRESETS[module.region.preset].whole_layers else 0.0
