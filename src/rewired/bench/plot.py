"""The plot of a bench: what each wiring wins over standard. The dashed line is the bound, no communication at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from .contenders import NONE, STANDARD, STOCK
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
# Okabe and Ito's, which colour-blind readers can tell apart; markers tell apart what shares one
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7")
_MARKERS = "os^Dvp<>hX"
_BASELINES: dict[str, dict[str, Any]] = {
    STANDARD: {"color": "#000000", "ls": "-"},
    STOCK: {"color": "#7f7f7f", "ls": ":"},
    NONE: {"color": "#7f7f7f", "ls": "--"},
}


def throughput(results: Mapping[str, Any]) -> Figure:
    """Speedups over standard: over the number of ranks where there are several, else over the batch, else as bars."""
    panels, styles = _panels(results["rows"]), _styles(_distinct(results["rows"], "wiring"))
    rows, columns = len(panels), len(panels[0])
    figure = Figure(figsize=(3 * columns + 0.5, 2.4 * rows + 0.8), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for axes_of_row, panels_of_row in zip(grid, panels, strict=True):
        for axes, panel in zip(axes_of_row, panels_of_row, strict=True):
            axes.set_title(panel.title, fontsize="medium")
            axes.spines[["top", "right"]].set_visible(False)
            (_draw_bars if len(panel.ticks) == 1 else _draw_lines)(axes, panel, styles)
        axes_of_row[0].set_ylabel(panels_of_row[0].side)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines if line.get_label() in styles}
    if lines:
        figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(_title(results), fontsize="medium", color="#555555")
    return figure


def _distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of `key`, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def _styles(wirings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of the lines: baselines and the bound are told apart by their dashes, wirings by colours and markers."""
    rewired = [name for name in wirings if name not in _BASELINES]
    return {name: {"marker": ".", **look} for name, look in _BASELINES.items()} | {
        name: {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
        for number, name in enumerate(rewired)
    }


@dataclass(frozen=True)
class _Panel:
    """Rows by wiring and then by tick, a batch or a number of ranks: their speedups over standard are drawn."""

    title: str
    side: str
    measure: str
    unit: str  # batch or tp
    ticks: Sequence[int]
    rows: Mapping[str, Mapping[int, Row]]

    def speedups(self, wiring: str) -> Iterator[tuple[float, ...]]:
        """And the ends of the range that each is in."""
        each = [
            (row["speedup"][self.measure][STANDARD], *row["speedup_range"][self.measure][STANDARD])
            for row in self.rows[wiring].values()
        ]
        return zip(*each, strict=True)


def _panels(rows: Sequence[Row]) -> list[list[_Panel]]:
    """By row and column of the figure."""
    measures = [measure for measure in _TITLES if any(measure in row["speedup"] for row in rows)]
    links = _distinct(rows, "link")
    if len(_distinct(rows, "tp")) == 1:
        return [[_panel(rows, link, measure, "batch") for measure in measures] for link in links]
    by_batch = [[row for row in rows if row["batch"] == batch] for batch in _distinct(rows, "batch")]
    return [[_panel(own, link, measure, "tp") for own in by_batch] for link in links for measure in measures]


def _panel(rows: Sequence[Row], link: str, measure: str, unit: str) -> _Panel:
    of_wiring: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["link"] == link and measure in row["speedup"]:
            of_wiring.setdefault(row["wiring"], {})[row[unit]] = row
    title, side = _TITLES[measure], link
    if unit == "tp":
        title, side = f"batch {rows[0]['batch']}", f"{_TITLES[measure]}, {link}"
    return _Panel(title, f"{side}\nspeedup over standard", measure, unit, _distinct(rows, unit), of_wiring)


def _draw_lines(axes: Any, panel: _Panel, styles: Mapping[str, dict[str, Any]]) -> None:
    for name, rows in panel.rows.items():
        places = [place for place, tick in enumerate(panel.ticks) if tick in rows]
        speedups, low, high = panel.speedups(name)
        axes.vlines(places, low, high, color=styles[name]["color"], lw=0.8)
        axes.plot(places, speedups, label=name, lw=1.3, ms=4, **styles[name])
    axes.set_xticks(range(len(panel.ticks)), panel.ticks)
    axes.set_xlabel({"batch": "batch", "tp": "ranks"}[panel.unit])
    axes.yaxis.set_major_formatter("{x:g}x")


def _draw_bars(axes: Any, panel: _Panel, styles: Mapping[str, dict[str, Any]]) -> None:
    """Bars begin at 1: faster than standard is to the right, slower to the left."""
    names = [name for name in panel.rows if name != STANDARD]
    axes.margins(x=0.3)  # for the values
    for place, name in enumerate(names):
        (value,), (low,), (high,) = panel.speedups(name)
        colour = styles[name]["color"]
        hollow = {"fill": False, "ls": "--"} if name == NONE else {"color": colour}
        axes.barh(place, value - 1, left=1, height=0.7, edgecolor=colour, **hollow)
        axes.hlines(place, low, high, color="black", lw=0.8)
        text = "inconclusive" if low < 1 < high else f"{value:.2f}x"
        where = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
        axes.annotate(text, (max(high, 1), place), **where)
    axes.axvline(1, color="black", lw=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
    axes.xaxis.set_major_formatter("{x:g}x")


def _title(results: Mapping[str, Any]) -> str:
    first, ranks = results["rows"][0], _distinct(results["rows"], "tp")
    model = [f"{first['model']}, {first['layers']} layers", *([f"TP {ranks[0]}"] if len(ranks) == 1 else [])]
    tokens = f"prompt {first['prompt']}, {first['new']} new tokens"
    if results["request"]["trains"]:
        tokens = f"sequences of {first['prompt']} tokens"
    return f"{'; '.join(model)}\n{tokens}; {results['environment']['device']}"
