"""The plan for people and for programs: tables, the layer's times, JSON."""

from __future__ import annotations

import math
from typing import Any

from rewired.quantities import count
from rewired.tables import new_table

from .machine import Load, best_share, capacity
from .pass_time import pass_time
from .ranking import Priced, Ranking, convert_command
from .weights import BF16

PROMISE = (
    "Trust the ratios more than the times: docs/plan-checks.md says how far off they were. 'none' does not "
    "communicate at all: its output is wrong, and its speedup the bound."
)


def print_plan(plan: Ranking, explain: bool) -> None:
    from rich.console import Console

    console, request, sheet = Console(markup=False), plan.request, plan.machine.hardware
    replicas = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
    numbers = "" if request.weights == BF16.name else f" in {request.weights}"
    nodes = request.gpus // sheet.gpus_per_node
    gpus = f"{nodes}x{sheet.gpus_per_node}" if nodes > 1 else request.gpus
    whose = request.calibration if plan.machine.all_reduce.benched else request.library
    library = f"of {whose}" if plan.machine.all_reduce.curves else "by a ring's formula"
    console.print(
        f"{request.model}{numbers} on {gpus} {sheet.title}, TP {plan.machine.tp}{replicas}, "
        f"all-reduces {library}; prompt {request.prompt}, {count(request.new, 'new token')}; ranked by {request.goal}.",
        soft_wrap=True,
        highlight=False,
    )
    for batch, cache in plan.caches.items():
        console.print(_table(plan, batch, cache))
    lines = list(plan.left_out)
    if any(row.candidate.quality and row.candidate.quality.source.startswith("SmolLM2") for row in plan.rows):
        lines.append(
            "KL (nats a token of prose, interpolated between numbers of layers) and gates were measured on "
            "SmolLM2-135M; yours will differ. Its models were made by commands like those below."
        )
    for line in [*lines, PROMISE]:
        console.print(line, soft_wrap=True, highlight=False)
    if explain:
        _print_layer(console, plan)
    console.print("The best, to make:" if plan.best() else "No wiring within that KL is faster than standard.")
    for candidate in plan.best():
        command = convert_command(request.model, candidate, plan.machine.tp)
        console.print(f"    {command}", soft_wrap=True, highlight=False)
    if plan.best() and request.weights != BF16.name:
        console.print(f"Then quantise it to {request.weights} (docs/quantise.md). KL is the wiring's alone.")


def _table(plan: Ranking, batch: int, cache: float) -> Any:
    memory = f"{plan.weights / 1e9:.1f} GB of weights and {cache / 1e9:.1f} GB of cache on each GPU"
    headings = ("TTFT\nms", "token\nms", "tokens\n/s", "speedup", "range", "waits\n/token", "KiB", "KL")
    grid = new_table(f"batch {batch}: {memory}", ["wiring", *headings])
    for row in plan.listed(batch):
        grid.add_row(*_cells(row))
    return grid


def _cells(row: Priced) -> tuple[str, ...]:
    unknown = "not measured" if row.candidate.is_rewired else ""
    return (
        "\n  ".join([row.candidate.name, *row.candidate.gates]),
        f"{row.ttft_seconds * 1e3:.{0 if row.ttft_seconds >= 1 else 1}f}",
        f"{row.token_seconds * 1e3:.2f}",
        f"{row.tokens_per_second:.0f}",
        f"{row.speedup:.3f}",
        "{:.2f}-{:.2f}".format(*row.speedup_range),
        str(row.exposed_all_reduces),
        f"{row.exposed_bytes / 1024:.0f}",
        unknown if row.kl == math.inf else f"{row.kl:.2g}",
    )


def _print_layer(console: Any, plan: Ranking) -> None:
    headings = ("batch", "pass", "attention", "overhead", "MLP", "overhead", "all-reduce", "hidden")
    grid = new_table("where the time of a layer goes, microseconds", headings, words=0)
    engine = plan.machine.engine
    for batch in plan.caches:
        for name, layer in layer_times(plan, batch).items():
            overheads = engine.attention_overhead * 1e6, engine.mlp_overhead * 1e6
            cells = layer["attention"], overheads[0], layer["mlp"], overheads[1], layer["all_reduce"]
            grid.add_row(str(batch), name, *(f"{cell:.1f}" for cell in cells), f"{layer['hidden_at_most']:.0%}")
    console.print(grid)
    if plan.machine.tp > 1:
        ratio, request = capacity(plan.machine), plan.request
        share = best_share(plan.shape.hidden_size, request.prompt, ratio, plan.machine.tp)
        console.print(
            "Overhead is the part of a module that does not shrink with its work; hidden is the most of an all-reduce "
            f"that compute can hide. CAAT-Net's law for a prefill: C is {ratio:.0f} FLOP a number reduced and p* "
            f"{share:.3f}, the share of the channels at which all-reduces take as long as compute.",
            soft_wrap=True,
            highlight=False,
        )


def layer_times(plan: Ranking, batch: int) -> dict[str, dict[str, float]]:
    """Of prefill and decoding: microseconds of a standard layer, and the share of an all-reduce that can be hidden."""
    rank = plan.machine.rank(plan.shape)
    layers, load = plan.shape.num_hidden_layers, Load(batch, plan.request.prompt, plan.request.new)
    all_reduce, tp, times = plan.machine.all_reduce, plan.machine.tp, {}
    for name, step in zip(("prefill", "decode"), load.steps, strict=True):
        total = pass_time(rank, all_reduce, plan.shape.wiring([]), step)
        size = 2 * step.rows * plan.shape.hidden_size
        whole = all_reduce.seconds(size, tp)
        times[name] = {
            "attention": total.attention / layers * 1e6,
            "mlp": total.mlp / layers * 1e6,
            "all_reduce": total.communication / layers / 2 * 1e6,
            "hidden_at_most": 1 - all_reduce.least_wait(size, tp) / whole if whole else 1.0,
        }
    return times


def to_json(plan: Ranking) -> dict[str, Any]:
    """Everything in the tables, and more: times in seconds, sizes in bytes."""
    asked = ("model", "hardware", "library", "weights", "gpus", "prompt", "new", "goal")
    return {
        **{name: getattr(plan.request, name) for name in asked},
        "gpus_per_node": plan.machine.hardware.gpus_per_node,
        "tp": plan.machine.tp,
        "weight_bytes": plan.weights,
        "cache_bytes": plan.caches,
        "rows": [_row_json(row) for batch in plan.caches for row in plan.listed(batch)],
        "left_out": plan.left_out,
        "layer_microseconds": {batch: layer_times(plan, batch) for batch in plan.caches},
        "commands": [convert_command(plan.request.model, each, plan.machine.tp) for each in plan.best()],
    }


def _row_json(row: Priced) -> dict[str, Any]:
    facts = {"wiring": row.candidate.name, **vars(row), "gates": row.candidate.gates}
    facts["kl"], facts["kl_source"] = row.candidate.quality or (None, None)
    del facts["candidate"]
    return facts
