"""The table that the commands print: a checkpoint's layers, and notes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from rewired.quantities import count
from rewired.tables import new_table

from .traffic import LayerTable, Traffic


def print_table(title: str, table: LayerTable, notes: Sequence[str] = ()) -> None:
    """Layer by layer: wiring, all-reduces a token, those that are waited for, bytes sent."""
    console = Console(markup=False)
    sent = f"sent a token and\nrank, {count(table.tp_shards, 'shard')}"
    headings = ("layers", "wiring", "all-reduces\na token", "of which\nwaited for", sent)
    grid = new_table(title, headings, words=2)
    for layers, wiring, traffic in table.rows:
        grid.add_row(layers, wiring, *_cells(traffic))
    grid.add_section()
    grid.add_row("all", "before: dense", *_cells(table.dense), style="dim")
    grid.add_row("all", "now", *_cells(table.total), style="bold")
    console.print(grid)
    console.print(table.remarks, soft_wrap=True)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False)


def _cells(traffic: Traffic) -> tuple[str, str, str]:
    return str(traffic.all_reduces), str(traffic.exposed), f"{traffic.bytes_sent / 1024:.1f} KiB"
