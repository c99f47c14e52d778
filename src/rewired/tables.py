"""Tables that commands print, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def new_table(title: str | None, headings: Sequence[str], words: int = 1) -> Any:
    """One without rows, narrow, of which the first columns are `words` and the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="left" if place < words else "right", no_wrap=place >= words)
    return grid


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One in Markdown; it ends in a newline."""
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in [headings, *rows])
    return "".join([first, f"|{'---|' * len(headings)}\n", *others])
