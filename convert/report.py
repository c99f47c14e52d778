"""Tables that the commands print: a checkpoint's layers and its notes, and the progress of a refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from rewired.progress import Bars
from rewired.quantities import count
from rewired.tables import new_table

from .traffic import LayerTable, Traffic

if TYPE_CHECKING:
    from rewired.refit.fitting import Errors, Fit


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


class FitTable:
    """A refit's progress, layer by layer: each module's error on held-out tokens before and after its fit."""

    def __init__(self, bars: Bars) -> None:
        self.bars, self.is_begun = bars, False

    def add(self, layer: int, layers: int, fits: Sequence[Fit]) -> None:
        if not self.is_begun:
            self.is_begun = True
            self.bars.print("Mean square errors on held-out tokens, in units of the original's stream:")
            self._print("layer", "module", "its gain", "what it reads", "its neurons", "the stream after")
        self.bars.show("refit: layer", layer + 1, layers)
        for fit in fits:
            parts = (fit.gain, fit.input, fit.placement, fit.output)
            self._print(str(fit.layer), fit.module, *("" if errors is None else _errors(errors) for errors in parts))

    def _print(self, layer: str, module: str, *cells: str) -> None:
        self.bars.print(" ".join([f"{layer:>5} {module:<9}", *(f"{cell:<15}" for cell in cells)]))


def _errors(errors: Errors) -> str:
    return f"{errors.before:.4f} → {errors.after:.4f}" if errors.after < errors.before else f"{errors.before:.4f}, kept"


def _cells(traffic: Traffic) -> tuple[str, str, str]:
    return str(traffic.all_reduces), str(traffic.exposed), f"{traffic.bytes_sent / 1024:.1f} KiB"
