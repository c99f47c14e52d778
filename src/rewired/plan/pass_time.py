"""The time of a forward pass: one walk over a wiring's modules, whatever the wiring.

Collectives follow one another on the link. Whoever needs one, a time w after it was launched, waits until it is done:
for all of its time c where nothing hides it, else for c - w, if the link was free, but at least for (1 - hide) (c - l).
Here l is its latency: what the smallest message takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby

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
    timeline, attentions = Timeline(), 0.0

    def run(module: ModuleWiring, work: float) -> None:
        timeline.wait(module.late)
        timeline.compute(work)
        timeline.wait(module.keeps)
        if communicates and module.launches:
            timeline.launch(*_launched(module, rank, all_reduce, step))

    def run_layer(layer: tuple[ModuleWiring, ModuleWiring]) -> None:
        run(layer[0], attention - fused_saving(rank, layer[0]))
        run(layer[1], mlp)

    for layer, count in _runs(wiring):
        attentions += count * (attention - fused_saving(rank, layer[0]))
        timeline.repeat(count, lambda layer=layer: run_layer(layer))  # type: ignore[misc]
    timeline.wait(0)
    return PassTime(attentions, wiring.num_layers * mlp, rank.head(step), timeline.communication, timeline.waited)


@cache
def _runs(wiring: Wiring) -> Sequence[tuple[tuple[ModuleWiring, ModuleWiring], int]]:
    """Layers that are alike and follow one another, and how many they are."""
    return [(layer, len(list(alike))) for layer, alike in groupby(wiring.layers)]


def _launched(module: ModuleWiring, rank: Rank, all_reduce: AllReduce, step: Step) -> tuple[float, float]:
    """Seconds of the collective after a module, and those of them that nothing can hide."""
    size, gpus = step.rows * module.payload_bytes(_ITEM), rank.tp
    if module.sections:
        seconds = all_reduce.quantised_seconds(size, gpus) + rank.quantising(step)
        latency = replace(all_reduce, slack=0.0).quantised_seconds(0, gpus)
        return seconds, (1 - all_reduce.hidden(size, gpus)) * max(seconds - latency, 0.0)
    if module.reduce == "all" and not module.overlapped:
        return all_reduce.waited_seconds(size, gpus), 0.0
    return all_reduce.seconds(size, gpus), all_reduce.least_wait(size, gpus)


@dataclass
class Timeline:
    """Of a rank that computes, launches collectives, and waits for them, in seconds from now."""

    waited: float = 0.0
    communication: float = 0.0
    link_is_free: float = 0.0
    in_flight: list[tuple[float, float]] = field(
        default_factory=list
    )  # when each is done, its least wait; oldest first

    def compute(self, seconds: float) -> None:
        self.link_is_free = max(self.link_is_free - seconds, 0.0)
        self.in_flight = [(done - seconds, least) for done, least in self.in_flight]

    def launch(self, seconds: float, least: float) -> None:
        """Start a collective, for which one waits so long at least."""
        self.communication += seconds
        self.link_is_free += seconds
        self.in_flight.append((self.link_is_free, least))

    def wait(self, leaving: int) -> None:
        """Until all are done but the newest `leaving`."""
        while len(self.in_flight) > leaving:
            seconds = max(self.in_flight.pop(0))
            self.waited += seconds
            self.compute(seconds)

    def repeat(self, times: int, run: Callable[[], None]) -> None:
        """What leaves all as it was takes as long each time."""
        for left in reversed(range(times)):
            before, waited, communication = (self.link_is_free, self.in_flight[:]), self.waited, self.communication
            run()
            if (self.link_is_free, self.in_flight) == before:
                self.waited += left * (self.waited - waited)
                self.communication += left * (self.communication - communication)
                return


def fused_saving(rank: Rank, module: ModuleWiring) -> float:
    """What an engine saves that computes as one module an attention and an MLP that run side by side."""
    return rank.engine.fused_saving if PRESETS[module.region.preset].whole_layers else 0.0
