"""The plan: every wiring priced on one machine, ranked by what it wins."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewired.checkpoint.shape import USABLE, Shape, cache_bytes, weight_bytes
from rewired.model.payload import FULL
from rewired.model.presets import STANDARD
from rewired.model.wiring_text import wiring_text
from rewired.quantities import count

from .machine import Generation, Load, Machine, serving_machine
from .machine_from_bench import calibrated
from .weights import BF16
from .wirings import DELAYED, Candidate, candidates, dense_shape, selected

DEFAULT_MAX_KL = 0.25  # nats a token
GOALS = ("ttft", "latency", "throughput")
_ITEM = 2  # bytes of a 16-bit number


@dataclass(frozen=True)
class PlanRequest:
    model: str
    hardware: str = "h100"
    library: str = "vllm"
    weights: str = BF16.name
    gpus: int = 8
    gpus_per_node: int | None = None  # as many as the hardware's own nodes have, if None
    tp: int | None = None  # all of the GPUs, if None
    prompt: int = 2048
    new: int = 256
    batches: tuple[int, ...] = (1, 16, 64)
    goal: str = "throughput"
    wirings: tuple[str, ...] | None = None  # to price, and no others
    max_kl: float | None = None  # DEFAULT_MAX_KL, or none of `wirings`, if None
    lists_all: bool = False
    frontier: Path | None = None
    calibration: Path | None = None

    def check(self) -> None:
        """Raises ValueError with one sentence for what cannot be planned."""
        counts = {"--prompt": self.prompt, "--new": self.new, "--tp": 1 if self.tp is None else self.tp}
        for flag, value in counts.items():
            if value < 1:
                raise ValueError(f"{flag} is {value}: it must be at least 1.")
        if self.gpus % (self.tp or 1):
            raise ValueError(f"--tp {self.tp} does not divide --gpus {self.gpus}: choose a number that does.")
        if self.goal not in GOALS:
            raise ValueError(f"There is no goal '{self.goal}': choose one of {', '.join(GOALS)}, or train.")
        if self.max_kl is not None and not (math.isfinite(self.max_kl) and self.max_kl >= 0):
            raise ValueError(f"--max-kl is {self.max_kl}: it must be a number of nats, at least 0.")

    @property
    def limit(self) -> float | None:
        """The KL of the worst wiring to recommend. What is named is not judged, unless it is asked for."""
        return DEFAULT_MAX_KL if self.max_kl is None and self.wirings is None else self.max_kl


@dataclass(frozen=True)
class Priced:
    """A wiring at one batch. Fields have the names that `--json` gives them."""

    candidate: Candidate
    batch: int
    ttft_seconds: float
    token_seconds: float
    tokens_per_second: float  # of all replicas
    speedup: float  # over standard, by the goal
    speedup_range: tuple[float, float]
    exposed_all_reduces: int  # that a token waits for
    exposed_bytes: int  # of their messages, of one rank

    @property
    def kl(self) -> float:
        """Infinite where it is not measured: it may be anything."""
        return math.inf if self.candidate.quality is None else self.candidate.quality.kl


@dataclass(frozen=True)
class Ranking:
    request: PlanRequest
    machine: Machine
    shape: Shape
    weights: float  # bytes of one rank
    caches: dict[int, float]  # by batch, bytes of one rank
    rows: list[Priced]  # best first within a batch
    too_large: list[str]  # sentences

    @property
    def replicas(self) -> int:
        return self.request.gpus // self.machine.tp

    def listed(self, batch: int) -> list[Priced]:
        """What is worth a look, standard and the bound; or every row, if that is asked for."""
        rows, good = self._of_batch(batch), self.recommended(batch)
        return rows if self.request.lists_all else [row for row in rows if row in good or not row.candidate.is_rewired]

    def recommended(self, batch: int) -> list[Priced]:
        """The rewired ones within the limit, best first: as named, or those that none beats in both speedup and KL."""
        limit = self.request.limit
        good = [row for row in self._of_batch(batch) if row.candidate.is_rewired and (limit is None or row.kl <= limit)]
        if self.request.wirings is not None:
            return good
        better = [min((row.kl for row in good[:place]), default=math.inf) for place in range(len(good))]
        return [row for row, least in zip(good, better, strict=True) if row.speedup > 1 and row.kl < least]

    def best(self) -> list[Candidate]:
        """The recommended ones that win most over all batches; of equally fast ones, those of the lower KL."""
        names = dict.fromkeys(row.candidate.name for batch in self.caches for row in self.recommended(batch))
        rows = [[row for row in self.rows if row.candidate.name == name] for name in names]
        rows.sort(key=lambda rows: (-math.prod(row.speedup for row in rows), rows[0].kl))
        return [of_name[0].candidate for of_name in rows[:3]]

    @property
    def left_out(self) -> list[str]:
        """Sentences on what is not listed, and why."""
        return [*self.too_large, *self._too_bad(), *self._delayed()]

    def _too_bad(self) -> Iterator[str]:
        limit = self.request.limit
        if limit is None or self.request.lists_all:
            return
        costs = {row.candidate.name: row.kl for row in self.rows if row.candidate.is_rewired}
        if self.request.wirings is None:
            del costs[self._in_all_layers(DELAYED)]  # of which the next sentence is
        above = sum(limit < kl < math.inf for kl in costs.values())
        beaten = "" if self.request.wirings else " The list has those that no other one beats in both speedup and KL."
        yield f"Above a KL of {limit:g}: {above} of {count(len(costs), 'wiring')}.{beaten} --all lists all."
        if unknown := "; ".join(name for name, kl in costs.items() if kl == math.inf):
            yield f"Left out, since their KL is not measured: {unknown}."

    def _delayed(self) -> Iterator[str]:
        """Where reading two updates late wins more than one does, by more than this plan may be off."""
        rows = {(row.candidate.name, row.batch): row for row in self.rows}
        delayed, ladder = map(self._in_all_layers, (DELAYED, "ladder+peek"))
        pairs = [(rows.get((delayed, batch)), rows.get((ladder, batch))) for batch in self.caches]
        won = [two for two, one in pairs if two and one and two.speedup > one.speedup_range[1]]
        if wins := ", ".join(f"{row.speedup:.2f} at batch {row.batch}" for row in won):
            yield f"{delayed} wins {wins}, beyond the range of {ladder}. Its KL is not measured."

    def _in_all_layers(self, text: str) -> str:
        return f"{text}@0-{self.shape.num_hidden_layers}"

    def _of_batch(self, batch: int) -> list[Priced]:
        return [row for row in self.rows if row.batch == batch]


def make_ranking(request: PlanRequest) -> Ranking:
    """Raises ValueError with one sentence for unknown names, sizes that do not divide, and models that do not fit."""
    request.check()
    tp = request.tp or request.gpus
    shape = dense_shape(request.model).for_shards(tp)
    machine = serving_machine(request.hardware, request.library, tp, request.weights, request.gpus_per_node)
    shape.check_shards(tp, "--gpus" if request.tp is None else "--tp")
    node = machine.all_reduce.gpus_per_node
    if request.gpus > node and node % tp and tp % node:
        raise ValueError(
            f"--tp {tp} does not fit nodes of {node} GPUs, and a model would lie in parts of two: choose one that "
            f"divides {node}, or a multiple of it."
        )
    if request.calibration is not None:
        machine = calibrated(machine, request.calibration)
    chosen = candidates(shape, request.wirings) + (selected(request.frontier, shape) if request.frontier else [])
    weights, memory = weight_bytes(shape, tp, machine.weights.bytes), machine.hardware.memory * USABLE
    rows: list[Priced] = []
    too_large: list[str] = []
    caches: dict[int, float] = {}
    for batch in sorted(set(request.batches)):
        load = Load(batch, request.prompt, request.new)
        cache = cache_bytes(shape, tp, load.batch * (load.prompt + load.new))
        if weights + cache > memory:
            too_large.append(_too_large(batch, weights, cache, machine))
            continue
        caches[batch] = cache
        rows += _price(machine, shape, chosen, load, request)
    if not rows:
        raise ValueError(too_large[0])
    return Ranking(request, machine, shape, weights, caches, rows, too_large)


def _too_large(batch: int, weights: float, cache: float, machine: Machine) -> str:
    sheet = machine.hardware
    return (
        f"Batch {batch} does not fit: {weights / 1e9:.1f} GB of weights and {cache / 1e9:.1f} GB of cache on each GPU, "
        f"of which {sheet.title} has {sheet.memory / 1e9:.0f} GB, {USABLE:.0%} of it usable."
    )


def _price(
    machine: Machine, shape: Shape, chosen: Sequence[Candidate], load: Load, request: PlanRequest
) -> list[Priced]:
    """One batch's rows, best first."""
    machines = [machine, machine.off_by(-1), machine.off_by(1)]
    standard = [each.generate(shape, shape.wiring([]), load) for each in machines]
    rows = []
    for candidate in chosen:
        runs = [each.generate(shape, candidate.wiring, load, candidate.communicates) for each in machines]
        pairs = zip(standard, runs, strict=True)
        gains = [_value(base, request.goal) / _value(run, request.goal) for base, run in pairs]
        reduces = candidate.communicates and machine.tp > 1
        waiting = [module for module in candidate.wiring.modules if module.is_exposed and reduces]
        rows.append(
            Priced(
                candidate,
                load.batch,
                runs[0].prefill.seconds,
                runs[0].decode.seconds,
                runs[0].tokens_per_second * (request.gpus // machine.tp),
                speedup=gains[0],
                speedup_range=(min(gains), max(gains)),
                exposed_all_reduces=len(waiting),
                exposed_bytes=sum(module.payload_bytes(_ITEM) for module in waiting),
            )
        )
    return sorted(rows, key=lambda row: (-row.speedup, row.kl))


def _value(run: Generation, goal: str) -> float:
    """The seconds that the goal is about."""
    return {"ttft": run.prefill.seconds, "latency": run.decode.seconds, "throughput": run.seconds}[goal]


def convert_command(model: str, candidate: Candidate, tp: int) -> str:
    """The conversion that makes it, by its file or its text. A payload wants its basis; one alone, no refit."""
    regions = candidate.wiring.rewired_regions
    command = ["convert", model, "--wiring", str(candidate.file or wiring_text(regions))]
    if candidate.file is None and any(region.payload != FULL for region in regions):
        command += ["--rotate", "hadamard"]
    refit = [] if all(region.preset == STANDARD for region in regions) else ["--refit"]
    return shlex.join([*command, "--tp-shards", str(tp), *refit])
