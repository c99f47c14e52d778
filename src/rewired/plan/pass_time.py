"""The time of a forward pass: one walk over a wiring's modules, whatever the wiring.

A collective that nothing hides is waited for whole. One that runs behind the next module's compute w is waited for
max(c - w, (1 - hide) (c - l)) of its time c, where l is its latency: what the smallest message takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    counted = _counted(wiring)
    attention, mlp = rank.attention(step), rank.mlp(step)
    works = {"attention": attention, "fused": attention - rank.engine.fused_saving, "mlp": mlp}
    communication = waited = 0.0
    for (payload_bytes, is_quantised, behind), count in counted.collectives.items() if communicates else ():
        size = step.rows * payload_bytes
        if is_quantised:
            seconds = all_reduce.quantised_seconds(size, rank.tp) + rank.quantising(step)
            latency = replace(all_reduce, slack=0.0).quantised_seconds(0, rank.tp)
        else:
            seconds, latency = all_reduce.seconds(size, rank.tp), all_reduce.latency(size, rank.tp)
        hide = all_reduce.hidden(size, rank.tp)
        communication += count * seconds
        waited += count * (exposed(seconds, latency, works[behind], hide) if behind else seconds)
    attentions = counted.fused * works["fused"] + (wiring.num_layers - counted.fused) * attention
    return PassTime(attentions, wiring.num_layers * mlp, rank.head(step), communication, waited)


@dataclass(frozen=True)
class _Counted:
    """What a wiring's walk meets: its collectives by bytes a token, whether they are quantised, and what hides them."""

    collectives: Mapping[tuple[int, bool, str], int]
    fused: int  # layers


@cache  # a wiring has few kinds of collectives, and many modules
def _counted(wiring: Wiring) -> _Counted:
    works = [work for first, _ in wiring.layers for work in ("fused" if _is_fused(first) else "attention", "mlp")]
    met = (
        (module.payload_bytes(_ITEM), bool(module.sections), after if module.overlapped else "")
        for module, after in zip(wiring.modules, [*works[1:], ""], strict=True)
        if module.launches
    )
    return _Counted(Counter(met), works.count("fused"))


def exposed(collective: float, latency: float, work: float, hide: float) -> float:
    """The seconds waited for of a collective behind `work`, which hides its latency and a share of the rest."""
    return max(collective - work, (1 - hide) * (collective - latency))


def _is_fused(module: ModuleWiring) -> bool:
    """Whether an engine may compute as one module an attention and an MLP that run side by side."""
    return PRESETS[module.region.preset].whole_layers
