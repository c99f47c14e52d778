"""The report of a bench: tables for the terminal, and the same ones as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rewired.tables import markdown as markdown_table
from rewired.tables import new_table

from .contenders import NONE, STANDARD, STOCK
from .results import GENERATION
from .runs import DECODE, DECODE_COMPILED, MEASURES, PREFILL, PREFILL_COMPILED, TRAINING

Row = Mapping[str, Any]

_TITLES = {
    PREFILL: "prefill",
    PREFILL_COMPILED: "compiled prefill",
    DECODE: "token",
    DECODE_COMPILED: "compiled token",
    TRAINING: "training step",
}
_OPEN = "inconclusive"
READING = (
    "Times are medians of interleaved rounds, ± half of the quartiles' distance. x is the speedup over standard, the "
    "median of the rounds' own ratios; it is inconclusive where they leave open which of both is faster (95 %). Hidden "
    "is the share of communication that a wiring saves: (standard - wiring) / (standard - none). Waits is the share of "
    "a training step in which nothing but communication goes on: 1 - none / wiring. stock is the engine's own model by "
    "its own tensor parallelism. none does not communicate at all: its output is wrong, and nothing can be faster."
)


@dataclass(frozen=True)
class Table:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """One for each number of ranks, batch and link, and one of what a slow link adds; then the all-reduces."""

    def group(row: Row) -> tuple[Any, ...]:
        return row["tp"], row["batch"], row["link"]

    for (tp, batch, link), rows in groupby(results["rows"], group):
        of_cell = list(rows)
        ranks = f"TP {tp}" if of_cell[0]["fsdp"] == 1 else f"TP {tp} x FSDP {of_cell[0]['fsdp']}"
        yield _cell_table(f"{ranks}, batch {batch}, {link}", of_cell)
        if "link_adds" in of_cell[0]:
            yield _link_table(f"{ranks}, batch {batch}: what {link} adds to the machine's own link", of_cell)
    if results["all_reduce"]:
        yield _all_reduces(results["all_reduce"])


def markdown(results: Mapping[str, Any]) -> str:
    """The text of report.md."""
    request, machine = results["request"], results["environment"]
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("device", "date"))
    parts = [
        f"# {request['model']}: what each wiring takes",
        f"`{results['command']}`, {machine['date']}; {machine['device']}, {facts}.",
        f"{results['rows'][0]['layers']} layers, {request['dtype']}, {_tokens(request)}, {request['rounds']} rounds. "
        f"{READING}",
        *(f"{table.title}:\n\n{markdown_table(table.headings, table.rows)}".rstrip() for table in tables(results)),
    ]
    return "\n\n".join(parts) + "\n"


def _tokens(request: Mapping[str, Any]) -> str:
    if request["trains"]:
        return f"training on sequences of {request['prompt']} tokens"
    return f"{request['prompt']} tokens of prompt, {request['new']} new ones"


def print_report(results: Mapping[str, Any]) -> None:
    """The tables and how to read them."""
    from rich.console import Console

    console = Console(markup=False, width=300)  # a narrower terminal wraps a table, and hides nothing
    for each in tables(results):
        grid = new_table(each.title, [heading.replace(" ", "\n") for heading in each.headings])
        for row in each.rows:
            grid.add_row(*row)
        console.print(grid)
    console.print(READING, soft_wrap=True, highlight=False)


def _cell_table(title: str, rows: Sequence[Row]) -> Table:
    measures = [measure for measure in MEASURES if f"{measure}_seconds" in rows[0]]
    timed = [heading for measure in measures for heading in (f"{_TITLES[measure]} ms", "x")]
    hides = any(row["hidden"] for row in rows)
    hidden = [f"hidden: {_TITLES[measure]}" for measure in measures] if hides else []
    trains = TRAINING in measures
    headings = ["wiring", *timed, "tokens/s", *["x"] * (not trains), *hidden, *["waits"] * trains]
    return Table(title, headings, [_cells(row, measures, bool(hidden)) for row in rows])


def _cells(row: Row, measures: Sequence[str], hides: bool) -> list[str]:
    cells = [row["wiring"]]
    for measure in measures:
        seconds, (low, high) = row[f"{measure}_seconds"], row[f"{measure}_quartiles"]
        cells += [f"{_digits(1e3 * seconds)} ±{50 * (high - low) / seconds:.0f}%", _ratio(row, measure)]
    cells.append(_digits(row["tokens_per_second"]))
    if TRAINING not in measures:
        cells.append(_ratio(row, GENERATION))
    if hides:
        is_end = row["wiring"] in (STOCK, STANDARD, NONE)
        said = {name: share for name, share in row["hidden"].items() if not (is_end or _is_open(row, name))}
        cells += [f"{said[name]:.0%}" if name in said else "" for name in measures]
    if TRAINING in measures:
        cells.append(f"{row['waits'][TRAINING]:.0%}" if row["waits"] else "")
    return cells


def _ratio(row: Row, measure: str) -> str:
    return _OPEN if _is_open(row, measure) else f"{row['speedup'][measure][STANDARD]:.2f}"


def _is_open(row: Row, measure: str) -> bool:
    """Whether the rounds leave it open which is faster, it or standard."""
    low, high = row["speedup_range"][measure][STANDARD]
    return bool(low < 1 < high)


def _digits(number: float) -> str:
    """Three digits at least."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _link_table(title: str, rows: Sequence[Row]) -> Table:
    """Time that the slow link adds; what is won and saved of standard's; and how many bytes are sent less."""
    measures = list(rows[0]["link_adds"])
    standard = next(row for row in rows if row["wiring"] == STANDARD)
    headings = ["wiring"]
    for measure in measures:
        headings += [f"{_TITLES[measure]} ms", "won", "saved"] + ["bytes saved"] * (measure in standard["bytes_sent"])
    return Table(title, headings, [_link_cells(row, standard, measures) for row in rows])


def _link_cells(row: Row, standard: Row, measures: Sequence[str]) -> list[str]:
    cells = [row["wiring"]]
    for measure in measures:
        cells.append(_digits(1e3 * row["link_adds"][measure]))
        for shares in (row["link_won"], row["link_saved"]):
            cells.append(f"{shares[measure]:.0%}" if measure in shares else "")
        if measure in standard["bytes_sent"]:
            cells.append(f"{1 - row['bytes_sent'][measure] / standard['bytes_sent'][measure]:.0%}")
    return cells


def _all_reduces(entries: Sequence[Row]) -> Table:
    links = list(dict.fromkeys((entry["gpus"], entry["link"]) for entry in entries))
    times = {(entry["gpus"], entry["link"], entry["bytes"]): entry["seconds"] for entry in entries}
    rows = [
        [f"{size:,}", *(_digits(1e6 * times[*link, size]) if (*link, size) in times else "" for link in links)]
        for size in sorted({entry["bytes"] for entry in entries})
    ]
    return Table("all-reduces, µs", ["bytes", *(f"{link}, {gpus} ranks" for gpus, link in links)], rows)
