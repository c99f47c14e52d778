"""The command `rewired plan`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rewired import hardware as machines
from rewired.cli import positive_integers, report_errors
from rewired.hardware import Hardware
from rewired.model.wiring_text import parse_wirings


def add_commands(app: typer.Typer) -> None:
    app.command("plan")(_plan)


def _plan(
    model: Annotated[
        str, typer.Argument(help="A shape (llama-3.1-70b, llama-3.2-1b, tiny, ...), a folder or a hub id.")
    ],
    gpus: Annotated[str, typer.Option(metavar="N", help="How many GPUs: 8, or 2x4 for two nodes of four.")] = "8",
    hardware: Annotated[
        str, typer.Option(help="h100, h200, a100, b200, l40s or rtx-pro-6000; gaudi3 without measured all-reduces.")
    ] = "h100",
    library: Annotated[
        str | None, typer.Option(help="Whose all-reduce kernels: vllm (by default), vllm-fused, trtllm or nccl.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="What the weights are in: bf16 (by default), fp8, int8 or int4.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(metavar="R", help="Tensor-parallel degree; all GPUs by default, fewer give replicas.")
    ] = None,
    prompt: Annotated[int, typer.Option(metavar="N", help="Tokens of a prompt or of a training sequence.")] = 2048,
    new: Annotated[int | None, typer.Option(metavar="N", help="Tokens to generate, by default 256.")] = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Sequences at once, by default 1,16,64; for training one a GPU."),
    ] = None,
    goal: Annotated[str, typer.Option(help="What to rank by: ttft, latency (of a token), throughput or train.")] = (
        "throughput"
    ),
    wirings: Annotated[
        str | None,
        typer.Option(metavar="TEXT; ...", help="The wirings to price, such as ladder+peek@16-32; by default many."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(metavar="KL", help="The most that a wiring may cost, in nats a token; 0.25, if none is named."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List every priced wiring, not only those worth it.")] = False,
    frontier: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also price the choices in this selection.json of select.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use your machine's own speed: a results.json of bench.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Also print where the time of a layer goes, or of the best grid (--goal train)."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON.")] = False,
) -> None:
    """Predict what each wiring of a model would win on hardware that is not at hand, and rank them.

    It promises ratios, not absolute times. They follow from data sheets, measured all-reduces and a fit to published
    runs. docs/plan-checks.md says how far off they were.

    Examples:

    ```
    rewired plan llama-3.1-70b --gpus 8 --hardware h100 --batch 1,16,64 --max-kl 0.5
    rewired plan llama-3.1-70b --gpus 4 --hardware l40s --library nccl --goal ttft --explain
    rewired plan llama-3.1-8b --gpus 8 --wirings "ladder+peek; desync-4x@8-24, ladder@24-32"
    rewired plan llama-3.1-8b --goal train --gpus 4x8
    ```
    """
    with report_errors("rewired plan"):
        total, gpus_per_node = _gpus(gpus, machines.load(hardware))
        if goal == "train":
            for_inference = {"--library": library, "--weights": weights, "--tp": tp, "--new": new, "--max-kl": max_kl}
            _check_unused(for_inference | {"--all": every or None, "--frontier": frontier, "--calibrate": calibrate})
            _train(model, hardware, total, gpus_per_node, batch, prompt, wirings, explain, as_json)
            return
        from .ranking import PlanRequest, make_ranking
        from .report import print_plan, to_json

        given: Any = {"library": library, "weights": weights, "new": new}
        request = PlanRequest(
            model,
            hardware,
            gpus=total,
            gpus_per_node=gpus_per_node,
            tp=tp,
            prompt=prompt,
            batches=positive_integers("--batch", "1,16,64" if batch is None else batch, "batches"),
            goal=goal,
            wirings=None if wirings is None else tuple(parse_wirings(wirings)),
            max_kl=max_kl,
            lists_all=every,
            frontier=frontier,
            calibration=calibrate,
            **{name: value for name, value in given.items() if value is not None},
        )
        plan = make_ranking(request)
        if as_json:
            print(json.dumps(to_json(plan), indent=2))
        else:
            print_plan(plan, explain)


def _check_unused(options: Mapping[str, object]) -> None:
    for flag, value in options.items():
        if value is not None:
            raise ValueError(f"{flag} means nothing for a training: leave it out, or choose another --goal.")


def _train(
    model: str,
    hardware: str,
    gpus: int,
    gpus_per_node: int,
    batch: str | None,
    tokens: int,
    wirings: str | None,
    explain: bool,
    as_json: bool,
) -> None:
    from .grids import plan_grids, print_grids, to_json
    from .training_step import price_steps, print_steps, steps_json
    from .wirings import dense_shape

    sequences = positive_integers("--batch", str(gpus) if batch is None else batch, "batches")
    if len(sequences) > 1:
        raise ValueError(f"--batch {batch} names several numbers: a training step has one.")
    if tokens < 1:
        raise ValueError(f"--prompt is {tokens}: it must be at least 1.")
    shape, sheet = dense_shape(model), machines.load(hardware)
    nodes, in_each = math.ceil(gpus / gpus_per_node), min(gpus, gpus_per_node)
    plan = plan_grids(shape, sheet, nodes, in_each, sequences[0], tokens)
    grid = next((grid for grid in plan.grids if grid.tp > 1 == grid.y), None)
    if wirings is not None and grid is None:
        raise ValueError("No grid with tensor parallelism fits, so --wirings means nothing.")
    texts = None if wirings is None else parse_wirings(wirings)
    steps = price_steps(shape, hardware, in_each, grid, sequences[0], tokens, texts) if grid else []
    if as_json:
        print(json.dumps(to_json(plan) | {"wirings": steps_json(steps)}, indent=2))
        return
    step = f"a step of {sequences[0]} x {tokens} tokens"
    print_grids(plan, f"{model}, {step} on {nodes}x{in_each} {sheet.title}, milliseconds", explain)
    if grid:
        print_steps(steps, grid)


def _gpus(text: str, sheet: Hardware) -> tuple[int, int]:
    """How many in all, and in a node: the machine's own, where only a number is given."""
    matched = re.fullmatch(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})", text)
    if not matched:
        raise ValueError(f"--gpus {text} is not a number of GPUs: give 8, or 4x8 for four nodes of eight.")
    gpus, node = int(matched[2]), sheet.gpus_per_node
    if matched[1]:
        return int(matched[1]) * gpus, gpus
    if gpus > node and gpus % node:
        raise ValueError(
            f"--gpus {gpus} does not fill nodes of {node} {sheet.title}: give a multiple of {node}, or nodes too, such "
            "as 2x6."
        )
    return gpus, node
