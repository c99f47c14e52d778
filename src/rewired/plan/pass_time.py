"""The time of a forward pass: one walk over a wiring's modules, whatever the wiring.

A collective that nothing hides is waited for whole. One that runs behind the next module's compute w is waited for
max(c - w, (1 - hide) (c - l)) of its time c, where l is its latency: what the smallest message takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

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
    collectives, fused = _counted(wiring)
    attention, mlp = rank.attention(step), rank.mlp(step)
    works = {"attention": attention, "fused": attention - rank.engine.fused_saving, "mlp": mlp}
    communication = waited = 0.0
    for collective, count in collectives.items() if communicates else ():
        seconds, wait = _times(collective, rank, all_reduce, step, works)
        communication += count * seconds
        waited += count * wait
    attentions = fused * works["fused"] + (wiring.num_layers - fused) * attention
    return PassTime(attentions, wiring.num_layers * mlp, rank.head(step), communication, waited)


class _Collective(NamedTuple):
    payload_bytes: int  # a token
    is_quantised: bool
    is_whole: bool  # of all channels, so that a norm may follow in the same kernel
    behind: str  # the module whose work hides it; empty if none does


@cache  # a wiring has few kinds of collectives, and many modules
def _counted(wiring: Wiring) -> tuple[Mapping[_Collective, int], int]:
    """How many collectives of each kind a pass has, and how many layers whose modules an engine may fuse."""
    works = [work for first, _ in wiring.layers for work in ("fused" if _is_fused(first) else "attention", "mlp")]
    met = (
        _Collective(
            module.payload_bytes(_ITEM),
            bool(module.sections),
            module.reduce == "all" and not module.sections,
            after if module.overlapped else "",
        )
        for module, after in zip(wiring.modules, [*works[1:], ""], strict=True)
        if module.launches
    )
    return Counter(met), works.count("fused")


def _times(
    collective: _Collective, rank: Rank, all_reduce: AllReduce, step: Step, works: Mapping[str, float]
) -> tuple[float, float]:
    """Seconds that one takes, and those of them that are waited for."""
    size, gpus = step.rows * collective.payload_bytes, rank.tp
    if collective.is_quantised:
        seconds = all_reduce.quantised_seconds(size, gpus) + rank.quantising(step)
        latency = replace(all_reduce, slack=0.0).quantised_seconds(0, gpus)
    else:
        seconds, latency = all_reduce.seconds(size, gpus), all_reduce.latency(size, gpus)
    if collective.behind:
        return seconds, exposed(seconds, latency, works[collective.behind], all_reduce.hidden(size, gpus))
    return seconds, all_reduce.waited_seconds(size, gpus) if collective.is_whole else seconds


def exposed(collective: float, latency: float, work: float, hide: float) -> float:
    """The seconds waited for of a collective behind `work`, which hides its latency and a share of the rest."""
    return max(collective - work, (1 - hide) * (collective - latency))


def _is_fused(module: ModuleWiring) -> bool:
    """Whether an engine may compute as one module an attention and an MLP that run side by side."""
    return PRESETS[module.region.preset].whole_layers
