"""Tables that the commands print: a checkpoint's layers and its notes, and the progress of a refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rewired.quantities import count

from .traffic import LayerTable, Traffic

if TYPE_CHECKING:
    from rewired.refit.fitting import Errors, Fit


def print_table(title: str, table: LayerTable, notes: Sequence[str] = ()) -> None:
    """Layer by layer: wiring, all-reduces a token, those that are waited for, bytes sent."""
    console = Console(markup=False)
    grid = Table(title=title, title_justify="left")
    for heading in ("layers", "wiring"):
        grid.add_column(heading)
    for heading in (
        "all-reduces\na token",
        "of which\nwaited for",
        f"sent a token and\nrank, {count(table.tp_shards, 'shard')}",
    ):
        grid.add_column(heading, justify="right")
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
    """A refit's progress on stderr, layer by layer: each module's error on held-out tokens before and after its fit."""

    def __init__(self) -> None:
        self.progress = Progress(console=Console(stderr=True), transient=True)
        self.task = self.progress.add_task("layers", total=None)

    def __enter__(self) -> FitTable:
        self.progress.start()
        self.progress.console.print("Mean square errors on held-out tokens, in units of the original's stream:")
        self._print("layer", "module", "its gain", "what it reads", "its neurons", "the stream after")
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def add(self, layer: int, layers: int, fits: Sequence[Fit]) -> None:
        """Layer number `layer` of `layers` is done."""
        self.progress.update(self.task, total=layers, completed=layer + 1)
        for fit in fits:
            parts = (fit.gain, fit.input, fit.placement, fit.output)
            self._print(str(fit.layer), fit.module, *("" if errors is None else _errors(errors) for errors in parts))

    def _print(self, layer: str, module: str, *cells: str) -> None:
        self.progress.console.print(f"{layer:>5} {module:<9}", *(f"{cell:<15}" for cell in cells), highlight=False)


def _errors(errors: Errors) -> str:
    return f"{errors.before:.4f} → {errors.after:.4f}" if errors.after < errors.before else f"{errors.before:.4f}, kept"


def _cells(traffic: Traffic) -> tuple[str, str, str]:
    return str(traffic.all_reduces), str(traffic.exposed), f"{traffic.bytes_sent / 1024:.1f} KiB"
