"""All-reduce times: interpolated between measured ones where there are any, a ring's latency and bandwidth elsewhere.

The measurements are those of NVIDIA's aiconfigurator (collectives.csv; its first line gives source and licence).
"""

from __future__ import annotations

import csv
import math
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from rewired.hardware import Hardware

_T = TypeVar("_T")

LIBRARIES = ("vllm", "vllm-fused", "trtllm", "nccl")
_FUSED = "-fused"  # an engine fuses the library's all-reduces with the residual's addition and the norm after them


@dataclass(frozen=True)
class Curve:
    """Measured seconds by size in bytes, for one number of GPUs."""

    sizes: tuple[float, ...]  # rising
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Mapping[float, float]) -> Curve:
        """Seconds by size."""
        return cls(*zip(*sorted(points.items()), strict=True))

    def at(self, size: float) -> float:
        """Interpolated in log size and log time; constant below the smallest size, in proportion above the largest."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        right = bisect_right(self.sizes, size)
        left = right - 1
        share = math.log(size / self.sizes[left]) / math.log(self.sizes[right] / self.sizes[left])
        return self.seconds[left] ** (1 - share) * self.seconds[right] ** share


@dataclass(frozen=True)
class Ring:
    """A ring all-reduce of N GPUs: base + 2 (N - 1) step + 2 (N - 1) / N size / bandwidth."""

    base: float  # seconds
    step: float  # seconds
    bandwidth: float  # bytes/s

    def at(self, size: float, gpus: int) -> float:
        return self.base + 2 * (gpus - 1) * self.step + 2 * (gpus - 1) / gpus * size / self.bandwidth


@dataclass(frozen=True)
class Network:
    """The stage of an all-reduce between nodes: a tree in which chunks of the best size follow one another.

    Latency L and the time B of its bytes then add up to (sqrt(L) + sqrt(B))^2.
    """

    step: float  # seconds from node to node
    bandwidth: float  # bytes/s of a node

    def at(self, size: float, nodes: int, gpus: int) -> float:
        latency = 2 * math.ceil(math.log2(nodes)) * self.step
        return (math.sqrt(latency) + math.sqrt(2 * (gpus - 1) / gpus * size / self.bandwidth)) ** 2


@dataclass(frozen=True)
class AllReduce:
    """All-reduce times of a machine, within a node and between nodes.

    `slack` is what an all-reduce takes longer inside a model than in a loop of nothing else: launches, and ranks that
    come late. Compute hides its latency, in which little moves, and of the rest a share, `hide`.
    """

    curves: Mapping[int, Curve]  # by number of GPUs
    ring: Ring
    network: Network
    gpus_per_node: int
    slack: float = 0.0
    hide: float = 0.0
    fusion_saving: float = 0.0  # seconds, where the norm after an all-reduce waits for it and is fused with it
    fusion_up_to: Mapping[int, float] = field(default_factory=dict)  # bytes of the largest such message, by GPUs
    scale: float = 1.0  # to a machine where they were measured, by --calibrate
    halves: Mapping[int, tuple[Curve, Curve]] = field(default_factory=dict)  # reduce-scatter and all-gather, by GPUs
    benched: frozenset[int] = frozenset()  # numbers of GPUs that a bench timed, with the network between their nodes

    def seconds(self, size: float, gpus: int) -> float:
        """Of `size` bytes on each of `gpus` GPUs; nothing on one."""
        if gpus == 1:
            return 0.0
        return self.scale * (self.within_node(size, gpus) + self._between_nodes(size, gpus) + self.slack)

    def latency(self, size: float, gpus: int) -> float:
        """Seconds of the smallest message that goes the same way."""
        if gpus == 1:
            return 0.0
        return self.scale * (self.within_node(0, gpus) + self._between_nodes(0, gpus))

    def hidden(self, size: float, gpus: int) -> float:
        """The share that hides of what is no latency."""
        return self.hide

    def least_wait(self, size: float, gpus: int) -> float:
        """What no compute hides of it. A larger message may have taken less than the smallest."""
        return (1 - self.hidden(size, gpus)) * max(self.seconds(size, gpus) - self.latency(size, gpus), 0.0)

    def waited_seconds(self, size: float, gpus: int) -> float:
        """Of a whole reduction that the next norm waits for: an engine may compute both in one kernel."""
        is_fused = gpus <= self.gpus_per_node and size <= self.fusion_up_to.get(gpus, 0)
        saved = self.fusion_saving if is_fused else 0.0
        return max(self.seconds(size, gpus) - self.scale * saved, 0.0)

    def quantised_seconds(self, size: float, gpus: int) -> float:
        """Of an all-to-all and an all-gather in its place that send what an all-reduce of `size` bytes would."""
        return sum(self.halves_seconds(size, gpus))

    def halves_seconds(self, size: float, gpus: int) -> tuple[float, float]:
        """Of each of the two, of `size` bytes of all ranks' rows.

        A reduce-scatter stands for the all-to-all: it sends as much. Where these two were not measured, each is half of
        an all-reduce.
        """
        if gpus == 1:
            return 0.0, 0.0
        curves = _of_count(self.halves, within) if (within := self._together(gpus)) > 1 else None
        half = self.within_node(size, gpus) / 2
        first, second = (curve.at(size) for curve in curves) if curves else (half, half)
        other = self._between_nodes(size, gpus) / 2 + self.slack
        return self.scale * (first + other), self.scale * (second + other)

    def _together(self, gpus: int) -> int:
        """How many of them need no network on top: a node's, or all of those whose times have it in them."""
        return gpus if gpus in self.benched else min(gpus, self.gpus_per_node)

    def _between_nodes(self, size: float, gpus: int) -> float:
        nodes = math.ceil(gpus / self._together(gpus))
        return self.network.at(size, nodes, gpus) if nodes > 1 else 0.0

    def within_node(self, size: float, gpus: int) -> float:
        """What a node's share of `gpus` GPUs takes among themselves."""
        within = self._together(gpus)
        if within == 1:
            return 0.0
        curve = _of_count(self.curves, within)
        return curve.at(size) if curve else self.ring.at(size, within)


def _of_count(by_count: Mapping[int, _T], gpus: int) -> _T | None:
    """Numbers of GPUs that were not measured take as long as the next larger one that was."""
    return by_count[min(counts)] if (counts := [count for count in by_count if count >= gpus]) else None


@cache
def measured_curves(hardware: str, library: str, collective: str = "all_reduce") -> Mapping[int, Curve]:
    """Those that were measured, by number of GPUs; none for a machine or library without measurements."""
    points: dict[int, dict[float, float]] = {}
    for row in _rows():
        if (row["hardware"], row["library"], row["collective"]) == (hardware, library, collective):
            points.setdefault(int(row["gpus"]), {})[float(row["bytes"])] = float(row["microseconds"]) * 1e-6
    return {gpus: Curve.through(by_size) for gpus, by_size in points.items()}


def curves_of(hardware: Hardware, library: str) -> Mapping[int, Curve]:
    """Raises ValueError where this library was not measured on this machine."""
    if library not in LIBRARIES:
        raise ValueError(f"There is no library '{library}': choose one of {', '.join(LIBRARIES)}.")
    library = library.removesuffix(_FUSED)
    if hardware.measured is None:
        return {}
    curves = measured_curves(hardware.measured, library)
    if not curves:
        there = [name for name in LIBRARIES if measured_curves(hardware.measured, name)]
        raise ValueError(
            f"No all-reduce of {library} was measured on {hardware.title}: choose --library {' or '.join(there)}."
        )
    return curves


def fusion_of(hardware: Hardware, library: str) -> dict[str, Any]:
    """What AllReduce says of fused ones, from engines.toml. Raises ValueError where engines do not fuse here."""
    if not library.endswith(_FUSED):
        return {}
    table = tomllib.loads((files("rewired.plan") / "engines.toml").read_text("utf-8"))["fusion"]
    if hardware.name not in table["up_to"]:
        raise ValueError(
            f"Engines fuse no all-reduce on {hardware.title}: choose --library {library.removesuffix(_FUSED)}."
        )
    up_to = {int(gpus): size for gpus, size in table["up_to"][hardware.name].items()}
    return {"fusion_saving": table["saving"], "fusion_up_to": up_to}


def halves_of(hardware: Hardware) -> Mapping[int, tuple[Curve, Curve]]:
    """NCCL's reduce-scatter and all-gather, by number of GPUs; no other library was measured."""
    scatters, gathers = (
        measured_curves(hardware.measured or "", "nccl", collective) for collective in ("reduce_scatter", "all_gather")
    )
    return {gpus: (scatters[gpus], gathers[gpus]) for gpus in scatters}


@cache
def _rows() -> Sequence[Mapping[str, str]]:
    text = (files("rewired.plan") / "collectives.csv").read_text("utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
