"""What the commands print: the table of a checkpoint's layers, and its notes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .plan import LayerTable, Traffic


def print_table(title: str, table: LayerTable, notes: Sequence[str] = ()) -> None:
    """Layer by layer: wiring, all-reduces a token, those that are waited for, bytes sent."""
    console = Console()
    grid = Table(title=title, title_justify="left")
    for heading in ("layers", "wiring"):
        grid.add_column(heading)
    for heading in (
        "all-reduces\na token",
        "of which\nwaited for",
        f"sent a token and\nrank, {table.tp_shards} shards",
    ):
        grid.add_column(heading, justify="right")
    for layers, wiring, traffic in table.rows:
        grid.add_row(layers, wiring, *_cells(traffic))
    grid.add_section()
    grid.add_row("all", "before: dense", *_cells(table.dense), style="dim")
    grid.add_row("all", "now", *_cells(table.total), style="bold")
    console.print(grid)
    console.print("An all-reduce is not waited for where the next module, maybe of the next row, reads without it.")
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False)


def _cells(traffic: Traffic) -> tuple[str, str, str]:
    return str(traffic.all_reduces), str(traffic.exposed), f"{traffic.bytes_sent / 1024:.1f} KiB"
