"""The plot of a bench: what each wiring wins over standard. The dashed line is the bound, no communication at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .contenders import STANDARD
from .plot_style import Styles, name_ends, name_of
from .runs import DECODE, DECODE_COMPILED, PREFILL, PREFILL_COMPILED, TRAINING

Row = Mapping[str, Any]

_TITLES = {
    "generation": "tokens/s",
    PREFILL: "prefill",
    PREFILL_COMPILED: "compiled prefill",
    DECODE: "decode",
    DECODE_COMPILED: "compiled decode",
    TRAINING: "training step",
}


def throughput(results: Mapping[str, Any]) -> Figure:
    """Speedups over standard: over the number of ranks where there are several, else over the batch, else as bars."""
    panels, styles = _panels(results["rows"]), Styles(distinct(results["rows"], "wiring"))
    figure, grid = _figure(results, len(panels), len(panels[0]))
    for axes_of_row, panels_of_row in zip(grid, panels, strict=True):
        for axes, panel in zip(axes_of_row, panels_of_row, strict=True):
            axes.set_title(panel.title, fontsize="medium")
            (_draw_bars if len(panel.ticks) == 1 else _draw_lines)(axes, panel, styles)
        axes_of_row[0].set_ylabel(panels_of_row[0].side)
    name_ends(figure, styles)
    return figure


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of `key`, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


@dataclass(frozen=True)
class _Panel:
    """Rows by wiring and then by tick, a batch or a number of ranks: their speedups over standard are drawn."""

    title: str
    side: str
    measure: str
    unit: str  # batch or tp
    ticks: Sequence[int]
    rows: Mapping[str, Mapping[int, Row]]

    def speedups(self, wiring: str) -> tuple[list[float], list[float], list[float]]:
        """And the ends of the range that each is in."""
        ranges = [row["speedup_range"][self.measure][STANDARD] for row in self.rows[wiring].values()]
        return (
            [row["speedup"][self.measure][STANDARD] for row in self.rows[wiring].values()],
            [low for low, _ in ranges],
            [high for _, high in ranges],
        )


def _panels(rows: Sequence[Row]) -> list[list[_Panel]]:
    """By row and column of the figure."""
    measures = [measure for measure in _TITLES if any(measure in row["speedup"] for row in rows)]
    links = {link: [row for row in rows if row["link"] == link] for link in distinct(rows, "link")}
    if len(distinct(rows, "tp")) == 1:
        return [[_over_batches(of_link, measure) for measure in measures] for of_link in links.values()]
    return [_over_ranks(of_link, measure) for of_link in links.values() for measure in measures]


def _over_batches(rows: Sequence[Row], measure: str) -> _Panel:
    return _panel(rows, measure, "batch", _TITLES[measure], f"{rows[0]['link']}\nspeedup over standard")


def _over_ranks(rows: Sequence[Row], measure: str) -> list[_Panel]:
    side = f"{_TITLES[measure]}, {rows[0]['link']}\nspeedup over standard"
    by_batch = {batch: [row for row in rows if row["batch"] == batch] for batch in distinct(rows, "batch")}
    return [_panel(own, measure, "tp", f"batch {batch}", side) for batch, own in by_batch.items()]


def _panel(rows: Sequence[Row], measure: str, unit: str, title: str, side: str) -> _Panel:
    of_wiring: dict[str, dict[int, Row]] = {}
    for row in rows:
        if measure in row["speedup"]:
            of_wiring.setdefault(row["wiring"], {})[row[unit]] = row
    return _Panel(title, side, measure, unit, distinct(rows, unit), of_wiring)


def _draw_lines(axes: Any, panel: _Panel, styles: Styles) -> None:
    for name, rows in panel.rows.items():
        places = [place for place, tick in enumerate(panel.ticks) if tick in rows]
        speedups, low, high = panel.speedups(name)
        axes.vlines(places, low, high, color=styles.colour(name), lw=0.8)
        axes.plot(places, speedups, label=name, **styles.line(name))
    axes.set_xticks(range(len(panel.ticks)), panel.ticks)
    axes.set_xlabel({"batch": "batch", "tp": "ranks"}[panel.unit])
    axes.yaxis.set_major_formatter("{x:g}x")


def _draw_bars(axes: Any, panel: _Panel, styles: Styles) -> None:
    """Bars begin at 1: faster than standard is to the right, slower to the left."""
    names = [name for name in panel.rows if name != STANDARD]
    axes.margins(x=0.3)  # for the values
    for place, name in enumerate(names):
        (value,), (low,), (high,) = panel.speedups(name)
        axes.barh(place, value - 1, left=1, **styles.bar(name))
        axes.hlines(place, low, high, color="black", lw=0.8)
        text = "inconclusive" if low < 1 < high else f"{value:.2f}x"
        where = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
        axes.annotate(text, (max(high, 1), place), **where)
    axes.axvline(1, color=styles.colour(STANDARD), lw=1)
    axes.set_yticks(range(len(names)), [name_of(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
    axes.xaxis.set_major_formatter("{x:g}x")


def _figure(results: Mapping[str, Any], rows: int, columns: int) -> Any:
    """A figure and its grid of axes."""
    figure = Figure(figsize=(3 * columns + 0.5, 2.4 * rows + 0.4), layout=ConstrainedLayoutEngine(w_pad=0.1))
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(results), fontsize="medium", color="#555555")
    return figure, grid


def _title(results: Mapping[str, Any]) -> str:
    first, ranks = results["rows"][0], distinct(results["rows"], "tp")
    model = [f"{first['model']}, {first['layers']} layers", *([f"TP {ranks[0]}"] if len(ranks) == 1 else [])]
    tokens = f"prompt {first['prompt']}, {first['new']} new tokens"
    if results["request"]["trains"]:
        tokens = f"sequences of {first['prompt']} tokens"
    return f"{'; '.join(model)}\n{tokens}; {results['environment']['device']}"
