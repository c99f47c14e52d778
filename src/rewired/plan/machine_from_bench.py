"""The calibration: a machine whose times are scaled to what `rewired bench` measured on it.

FILE is JSON with `rows`, each {"wiring", "model", "tp", "batch", "prompt", "prefill_seconds", "decode_seconds"}, of
`standard`, `none` (no communication) and, where it was run, `ladder`; `layers` where not all of the model's were run,
`prefill_compiled_seconds` and `decode_compiled_seconds` where they were compiled; and perhaps `all_reduce`, each
{"gpus", "bytes", "seconds"}. Where several links were measured, `link` names the one that counts. A plan is for 16-bit
numbers, so messages of a bench whose `request` has `dtype` float32 count as half as long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rewired.checkpoint.named_shapes import find_shape
from rewired.checkpoint.shape import Shape
from rewired.model.presets import STANDARD
from rewired.model.wiring_text import NONE

from .all_reduce_time import Curve
from .compute import Rank, Step
from .machine import Machine
from .pass_time import PassTime, pass_time
from .wirings import wiring_of

_STEPS = 30  # of an approximation
_NUMBERS = ("tp", "batch", "prompt", "prefill_seconds", "decode_seconds")


@dataclass(frozen=True)
class _Row:
    shape: Shape
    wiring: str
    tp: int
    batch: int
    prompt: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def key(self) -> tuple[Any, ...]:
        return self.shape, self.tp, self.batch, self.prompt

    @property
    def seconds(self) -> tuple[float, float]:
        return self.prefill_seconds, self.decode_seconds


def calibrated(machine: Machine, file: Path) -> Machine:
    """Raises ValueError for a file that is not a bench report, or has no `none` beside a `standard` row."""
    report = _report(file)
    machine = with_all_reduces(machine, file)
    rows = [_row(entry, file) for entry in _of_its_link(report, "rows") if not _is_on_grid(entry)]
    runs = {(*row.key, row.wiring): row for row in rows}
    pairs = [(row, bound) for row in rows if row.wiring == STANDARD if (bound := runs.get((*row.key, NONE)))]
    if not pairs:
        raise ValueError(
            f"{file} has no run of '{NONE}' beside one of '{STANDARD}' without a grid: measure both with rewired bench."
        )
    machine = _scale_compute(machine, [bound for _, bound in pairs])
    if not report.get("all_reduce"):
        machine = _scale_communication(machine, pairs)
    return _hide(machine, [row for row in rows if row.wiring == "ladder"])


def with_all_reduces(machine: Machine, file: Path) -> Machine:
    """With the times of all-reduces that a bench measured, if it did.

    Raises ValueError for another kind of file, and for one that measured other numbers of ranks.
    """
    report = _report(file)
    times = _of_its_link(report, "all_reduce")
    is_wide = report.get("request", {}).get("dtype") == "float32"
    return _with_curves(machine, times, 0.5 if is_wide else 1.0, file) if times else machine


def _report(file: Path) -> Mapping[str, Any]:
    try:
        report = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{file} is not a JSON file: --calibrate takes a results.json of `rewired bench`.") from None
    if not isinstance(report, dict) or not isinstance(report.get("rows"), list):
        raise ValueError(f"{file} holds no 'rows': --calibrate takes a results.json of `rewired bench`.")
    return report


def _of_its_link(report: Mapping[str, Any], name: str) -> list[Any]:
    """The entries under `name`, of the link that counts where several were measured."""
    link, entries = report.get("link"), report.get(name) or []
    return [entry for entry in entries if link is None or not isinstance(entry, dict) or entry.get("link") == link]


def _is_on_grid(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("tp"), str)


def _row(entry: Any, file: Path) -> _Row:
    wiring, model, *numbers = _fields(entry, ("wiring", "model", *_NUMBERS), "a row", file)
    shape = find_shape(str(model))
    if "layers" in entry:
        shape = replace(shape, num_hidden_layers=entry["layers"])
    for place, measure in enumerate(("prefill_compiled_seconds", "decode_compiled_seconds"), len(numbers) - 2):
        if measure in entry:
            numbers[place] = _fields(entry, (measure,), "a row", file)[0]
    return _Row(shape, str(wiring), *numbers)


def _fields(entry: Any, names: Sequence[str], what: str, file: Path) -> list[Any]:
    """Raises ValueError where one is missing, or is no positive number but should be."""
    try:
        values = [entry[name] for name in names]
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"{file} has {what} without {', '.join(names)}: {entry!r}.") from None
    for name, value in zip(names, values, strict=True):
        if name not in ("wiring", "model") and not (type(value) in (int, float) and 0 < value < math.inf):
            raise ValueError(f"{file} has {name} {value!r}: it must be a positive number.")
    return values


def _with_curves(machine: Machine, entries: Sequence[Any], width: float, file: Path) -> Machine:
    points: dict[int, dict[float, float]] = {}
    for entry in entries:
        gpus, size, seconds = _fields(entry, ("gpus", "bytes", "seconds"), "an all_reduce", file)
        points.setdefault(gpus, {})[size * width] = seconds
    _check_covered(machine, sorted(points), file)
    curves = {gpus: Curve.through(by_size) for gpus, by_size in points.items()}
    all_reduce = replace(machine.all_reduce, curves=curves, halves={}, benched=frozenset(curves))
    return replace(machine, all_reduce=all_reduce)


def _check_covered(machine: Machine, measured: Sequence[int], file: Path) -> None:
    """Raise ValueError where neither so many ranks were measured, nor what a node has of them."""
    node = machine.all_reduce.gpus_per_node
    within = min(machine.tp, node)
    if machine.tp > 1 and machine.tp not in measured and not any(within <= ranks <= node for ranks in measured):
        raise ValueError(
            f"{file} has all-reduces of {' and '.join(map(str, measured))} ranks, and none of {within}: bench with "
            f"--tp {within}, or give --tp {measured[-1]} here."
        )


def _scale_compute(machine: Machine, bounds: Sequence[_Row]) -> Machine:
    """By what the engine takes longer without any communication: memory and overheads by decoding, products by prefill.

    A prefill is not of products alone, so their share is found step by step.
    """
    decode = median(row.decode_seconds / _predicted(machine, row)[1].seconds for row in bounds)
    engine = replace(
        machine.engine,
        memory_share=machine.engine.memory_share / decode,
        attention_overhead=machine.engine.attention_overhead * decode,
        mlp_overhead=machine.engine.mlp_overhead * decode,
    )
    for _ in range(_STEPS):
        scaled = replace(machine, engine=engine)
        prefill = median(row.prefill_seconds / _predicted(scaled, row)[0].seconds for row in bounds)
        engine = replace(engine, flops_share=min(1.0, engine.flops_share / prefill))
    return replace(machine, engine=engine)


def _scale_communication(machine: Machine, pairs: Sequence[tuple[_Row, _Row]]) -> Machine:
    """What is added by all-reduces, over what was predicted."""
    ratios = [
        max(own - silent, 0.0) / predicted.communication
        for row, bound in pairs
        for predicted, own, silent in zip(_predicted(machine, row), row.seconds, bound.seconds, strict=True)
        if predicted.communication
    ]
    scale = median(ratios) if ratios else 1.0
    return replace(machine, all_reduce=replace(machine.all_reduce, scale=machine.all_reduce.scale * scale))


def _hide(machine: Machine, ladders: Sequence[_Row]) -> Machine:
    """The share hidden that comes nearest to ladders' times; of equally near ones, the one nearest to ours."""
    ours = machine.all_reduce.hide

    def hiding(share: float) -> Machine:
        return replace(machine, all_reduce=replace(machine.all_reduce, hide=share))

    def distance(share: float) -> tuple[float, float]:
        passes = [zip(_predicted(hiding(share), row), row.seconds, strict=True) for row in ladders]
        off = [abs(math.log(measured / predicted.seconds)) for each in passes for predicted, measured in each]
        return round(sum(off), 6), abs(share - ours)

    return hiding(min([ours, *(percent / 100 for percent in range(101))], key=distance))


def _predicted(machine: Machine, row: _Row) -> tuple[PassTime, PassTime]:
    """A prefill and a decoding step just after it."""
    rank = Rank(row.shape, machine.hardware, machine.engine, row.tp)
    steps = Step(row.batch, row.prompt, row.prompt), Step(row.batch, 1, row.prompt + 1)
    wiring, communicates = wiring_of(row.shape, row.wiring), row.wiring != NONE
    prefill, decode = (pass_time(rank, machine.all_reduce, wiring, step, communicates) for step in steps)
    return prefill, decode
