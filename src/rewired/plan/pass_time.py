"""The time of a forward pass: one walk over a wiring's modules, whatever the wiring.

A collective that nothing hides is waited for whole. One that runs behind the next module's compute w is waited for
max(c - w, (1 - hide) (c - l)) of its time c, where l is its latency: what the smallest message takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from rewired.model.presets import PRESETS
from rewired.model.wiring import Wiring

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
    works = works_of(rank, step)
    communication = waited = 0.0
    for collective, count in collectives_of(wiring).items() if communicates else ():
        seconds, wait = _times(collective, rank, all_reduce, step, works[collective.after])
        communication += count * seconds
        waited += count * wait
    return PassTime(*layers_of(works, wiring), rank.head(step), communication, waited)


def works_of(rank: Rank, step: Step) -> Mapping[str, float]:
    """Seconds of the modules that `Collective.after` names."""
    attention = rank.attention(step)
    return {"attention": attention, "fused": attention - rank.engine.fused_saving, "mlp": rank.mlp(step), "": 0.0}


def layers_of(works: Mapping[str, float], wiring: Wiring) -> tuple[float, float]:
    """Seconds of all attentions, and of all MLPs."""
    return sum(works[name] for name in _attentions(wiring)), wiring.num_layers * works["mlp"]


class Collective(NamedTuple):
    payload_bytes: int  # a token
    is_quantised: bool
    is_whole: bool  # of all channels, so that a norm may follow in the same kernel
    after: str  # the module that comes next, empty if none does
    is_hidden: bool  # behind that module


@cache  # a wiring has few kinds of collectives, and many modules
def collectives_of(wiring: Wiring) -> Mapping[Collective, int]:
    """How many of each kind a pass has."""
    works = [work for attention in _attentions(wiring) for work in (attention, "mlp")]
    return Counter(
        Collective(
            module.payload_bytes(_ITEM),
            bool(module.sections),
            module.reduce == "all" and not module.sections,
            after,
            module.overlapped,
        )
        for module, after in zip(wiring.modules, [*works[1:], ""], strict=True)
        if module.launches
    )


@cache
def _attentions(wiring: Wiring) -> Sequence[str]:
    """Of each layer; an engine may compute as one module an attention and an MLP that run side by side."""
    return ["fused" if PRESETS[first.region.preset].whole_layers else "attention" for first, _ in wiring.layers]


def _times(collective: Collective, rank: Rank, all_reduce: AllReduce, step: Step, work: float) -> tuple[float, float]:
    """Seconds that one takes, and those of them that are waited for."""
    size, gpus = step.rows * collective.payload_bytes, rank.tp
    if collective.is_quantised:
        seconds = all_reduce.quantised_seconds(size, gpus) + rank.quantising(step)
        latency = replace(all_reduce, slack=0.0).quantised_seconds(0, gpus)
    else:
        seconds, latency = all_reduce.seconds(size, gpus), all_reduce.latency(size, gpus)
    if collective.is_hidden:
        return seconds, exposed(seconds, latency, work, all_reduce.hidden(size, gpus))
    return seconds, all_reduce.waited_seconds(size, gpus) if collective.is_whole else seconds


def exposed(collective: float, latency: float, work: float, hide: float) -> float:
    """The seconds waited for of a collective behind `work`, which hides its latency and a share of the rest."""
    return max(collective - work, (1 - hide) * (collective - latency))
