"""The ranked grids of a training: table, JSON, and the launch lines of the best three."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rewired.tables import new_table

from .grids import GridPlan
from .hardware import Hardware


def print_grids(
    plan: GridPlan, model: str, sheet: Hardware, nodes: int, gpus_per_node: int, batch: int, tokens: int
) -> None:
    from rich.console import Console

    console = Console(markup=False)
    title = f"{model}, a step of {batch} x {tokens} tokens on {nodes}x{gpus_per_node} {sheet.title}, milliseconds"
    sizes = ("tp", "fsdp", "replicate")
    grid = new_table(title, [*sizes, "all comm.", "activations", "weights", "gradients", "compute", "GB"], words=0)
    for each in plan.grids:
        seconds = each.communication, each.tensor, each.weights, each.gradients, each.compute
        cells = (str(size) for size in (each.tp, each.fsdp, each.replicate))
        grid.add_row(*cells, *(f"{time * 1e3:.1f}" for time in seconds), f"{each.memory / 1e9:.1f}")
    console.print(grid)
    caveat = "Ranked by AxoNN's model, in which no communication runs behind compute; times are no promise."
    for line in [*plan.left_out, caveat, "The best three, to launch:"]:
        console.print(line, soft_wrap=True, highlight=False)
    for each in plan.grids[:3]:
        console.print(f"    {each.command(nodes, gpus_per_node)}", soft_wrap=True, highlight=False)


def to_json(plan: GridPlan, nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """Times in seconds, memory in bytes of one GPU."""
    grids = [asdict(grid) | {"communication": grid.communication} for grid in plan.grids]
    commands = [grid.command(nodes, gpus_per_node) for grid in plan.grids[:3]]
    return {"grids": grids, "left_out": plan.left_out, "commands": commands}
