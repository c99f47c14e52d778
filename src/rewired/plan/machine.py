"""A machine with an engine on it: hardware, library and number of ranks, and what they promise together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rewired import hardware as machines
from rewired.checkpoint.shape import Shape
from rewired.hardware import Hardware
from rewired.model.wiring import Wiring

from . import engine as engines
from .all_reduce_time import AllReduce, Network, Ring, curves_of, fusion_of, halves_of
from .compute import Rank, Step
from .engine import Engine
from .pass_time import PassTime, pass_time
from .weights import BF16, Weights, weights_on

# How wrong all-reduce times and the hidden share may be: most published speedups lie within (docs/plan-checks.md).
COMMUNICATION_ERROR = 0.2
HIDE_ERROR = 0.1
_SLOW = 100e9  # bytes/s of PCIe at most
_LARGE = 256 * 1024 * 1024  # bytes of a message that has the full bandwidth


@dataclass(frozen=True)
class Load:
    """What is asked of a model: `batch` sequences with a prompt, and tokens to generate after it."""

    batch: int
    prompt: int
    new: int

    @property
    def steps(self) -> tuple[Step, Step]:
        """The prefill, and a decoding step in the middle of the generation."""
        return Step(self.batch, self.prompt, self.prompt), Step(self.batch, 1, self.prompt + self.new / 2)


@dataclass(frozen=True)
class Generation:
    """The times of a load's steps."""

    prefill: PassTime
    decode: PassTime
    load: Load

    @property
    def seconds(self) -> float:
        """Of the whole; the prefill yields the first of the new tokens."""
        return self.prefill.seconds + (self.load.new - 1) * self.decode.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.load.batch * self.load.new / self.seconds


@dataclass(frozen=True)
class Machine:
    hardware: Hardware
    engine: Engine
    all_reduce: AllReduce
    tp: int
    weights: Weights = BF16

    def generate(self, shape: Shape, wiring: Wiring, load: Load, communicates: bool = True) -> Generation:
        rank = self.rank(shape)
        prefill, decode = (pass_time(rank, self.all_reduce, wiring, step, communicates) for step in load.steps)
        return Generation(prefill, decode, load)

    def rank(self, shape: Shape) -> Rank:
        return Rank(shape, self.hardware, self.engine, self.tp, self.weights)

    def off_by(self, sign: int) -> Machine:
        """A machine on which wirings win less (-1) or more (1), as far as this one may be off."""
        scale = self.all_reduce.scale * (1 + COMMUNICATION_ERROR) ** sign
        hide = min(1.0, self.all_reduce.hide + sign * HIDE_ERROR)
        return replace(self, all_reduce=replace(self.all_reduce, scale=scale, hide=hide))


def serving_machine(
    hardware: str, library: str, tp: int, weights: str = BF16.name, gpus_per_node: int | None = None
) -> Machine:
    """An engine such as vLLM on hardware of that name, in nodes of its own size if `gpus_per_node` is None.

    Raises ValueError for unknown names.
    """
    sheet, engine = machines.load(hardware), engines.load("serving")
    if gpus_per_node:
        sheet = replace(sheet, gpus_per_node=gpus_per_node)
    return Machine(sheet, engine, all_reduces(sheet, engine, library), tp, weights_on(sheet, weights))


def all_reduces(sheet: Hardware, engine: Engine, library: str) -> AllReduce:
    return AllReduce(
        curves_of(sheet, library),
        Ring(engine.ring_base, engine.ring_step, sheet.link_bandwidth * engine.ring_share),
        Network(engine.network_step, sheet.network_bandwidth * sheet.gpus_per_node),
        sheet.gpus_per_node,
        slack=engine.slack,
        hide=engine.slow_hide if sheet.link_bandwidth < _SLOW else engine.hide,
        halves=halves_of(sheet),
        **fusion_of(sheet, library),
    )


def capacity(machine: Machine) -> float:
    """CAAT-Net's C: FLOP/s over the numbers that several GPUs all-reduce a second, in messages of full bandwidth."""
    numbers = _LARGE / 2 / machine.all_reduce.seconds(_LARGE, machine.tp)
    return machine.hardware.flops * machine.engine.flops_share / numbers


def best_share(hidden: int, sequence: int, ratio: float, tp: int) -> float:
    """CAAT-Net's equation 33: p*, the share of channels at which all-reduces take as long as compute."""
    return min((12 * hidden + 2 * sequence) / (ratio * tp), 1.0)
