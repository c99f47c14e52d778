"""The picture results/quality/bytes.png: KL over the bytes that a token waits for, from the .jsonl files there.

.venv/bin/python studies/bytes_report.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from quality import FOLDER, LAYERS, WINDOWS, read
from quality_report import kind, layers, newest, panels, save, wiring_colours

from rewired.convert.traffic import Traffic
from rewired.model.presets import STANDARD
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import parse_wiring
from rewired.refit.run import ALGORITHM_VERSION

HIDDEN_SIZE, SHARDS = 576, 3  # SmolLM2-135M's
PAYLOADS = {"": "o", "int8": "s", "int6": "P", "int4/int8": "D", "int4": "v"}  # and their markers
PARTIAL = {"none": "o", "missing": "^"}  # by basis
ROTATED, NOT_ROTATED, ANY = "black", "tab:cyan", "grey"  # colours of what is no wiring


class Point(NamedTuple):
    kib: float
    on: Mapping[str, Any]
    note: str = ""


class Series(NamedTuple):
    """Points that a line joins."""

    points: Sequence[Point]
    colour: str
    marker: str
    is_refitted: bool = True

    def style(self) -> dict[str, Any]:
        face = self.colour if self.is_refitted else "white"
        return {"color": self.colour, "marker": self.marker, "markerfacecolor": face, "markersize": 6, "linewidth": 0.8}


def main() -> None:
    measured = [row for row in newest(read(FOLDER / "measured.jsonl")) if _is_drawn(row)]
    rotated = _best([row for row in read(FOLDER / "rotations.jsonl") if row["algorithm"] == ALGORITHM_VERSION])
    colours = wiring_colours(measured)
    figure, axes = panels(f"KiB that a token waits for, sent by each rank (original: {_kib(STANDARD):.0f})")
    for series in [*_wirings(measured, colours), *_payloads(rotated, colours), *_partial(rotated, colours)]:
        for text, axis in axes.items():
            kls = [point.on[text]["kl"] for point in series.points]
            axis.plot([point.kib for point in series.points], kls, **series.style())
            for point, kl in zip(series.points, kls, strict=True):
                axis.annotate(point.note, (point.kib, kl), (5, -3), textcoords="offset points", fontsize=7)
    _add_legend(axes["prose"], colours)
    save(figure, FOLDER / "bytes.png")


def _is_drawn(row: dict[str, Any]) -> bool:
    """Refits of the version that parallel and desync-4x in all layers were last measured with, and of later ones."""
    return row["fit"] != "converted" and row["windows"] == WINDOWS and row["algorithm"] >= 6


def _best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As converted and refitted, each on the most tokens and judged on the most windows."""
    ordered = sorted(rows, key=lambda row: (row["tokens"], row["windows"]))
    return list({(row["wiring"], row["basis"], row["tokens"] > 0): row for row in ordered}.values())


def _add_legend(axis: Axes, colours: Mapping[str, str]) -> None:
    """Colours are wirings, markers are payloads."""
    entries = [
        *((name, Series([], colour, "")) for name, colour in colours.items() if not name.startswith("partial")),
        ("standard, rotated", Series([], ROTATED, "")),
        ("standard, not rotated", Series([], NOT_ROTATED, "")),
        *((payload or "no payload", Series([], ANY, marker)) for payload, marker in PAYLOADS.items()),
        ("open: as converted", Series([], ANY, "o", is_refitted=False)),
        *(
            (f"partial{', first what is missing' * (basis == 'missing')}", Series([], colours["partial-0.5"], marker))
            for basis, marker in PARTIAL.items()
        ),
    ]
    for label, series in entries:
        axis.plot([], [], label=label, **series.style())


def _wirings(rows: Sequence[dict[str, Any]], colours: Mapping[str, str]) -> list[Series]:
    """Wirings without a payload, refitted, of half of the layers and of all; on the most tokens that were measured."""
    of_wiring: dict[str, dict[str, Point]] = defaultdict(dict)
    for fit in ("refit 32k", "refit 64k"):
        for row in rows:
            if row["fit"] == fit and layers(row) in ("0-30", "15-30") and not row["wiring"].startswith("partial"):
                of_wiring[kind(row)][layers(row)] = _point(row)
    return [Series(list(points.values()), colours[name], PAYLOADS[""]) for name, points in of_wiring.items()]


def _payloads(rows: Sequence[dict[str, Any]], colours: Mapping[str, str]) -> list[Series]:
    """Of each wiring and payload, whatever its layers."""
    found: dict[tuple[str, str, bool], list[Point]] = defaultdict(list)
    for row in rows:
        region = row["wiring"].rpartition(", ")[2]  # the upper one
        wiring, _, payload = region.partition("@")[0].rpartition("+")
        if payload in PAYLOADS and row["basis"] in ("hadamard", "none"):
            standard = ROTATED if row["basis"] == "hadamard" else NOT_ROTATED
            colour = standard if wiring == STANDARD else colours[wiring]
            found[colour, PAYLOADS[payload], row["tokens"] > 0].append(_point(row))
    return [Series(_by_bytes(points), *looks) for looks, points in found.items()]


def _partial(rows: Sequence[dict[str, Any]], colours: Mapping[str, str]) -> list[Series]:
    found: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        if row["wiring"].startswith("partial") and row["basis"] in PARTIAL and row["tokens"]:
            found[row["basis"]].append(_point(row, kind(row).removeprefix("partial-")))
    return [Series(_by_bytes(points), colours["partial-0.5"], PARTIAL[basis]) for basis, points in found.items()]


def _point(row: dict[str, Any], note: str = "") -> Point:
    return Point(_kib(row["wiring"]), row["on"], note)


def _by_bytes(points: Iterable[Point]) -> list[Point]:
    return sorted(points, key=lambda point: -point.kib)


def _kib(wiring: str) -> float:
    """What each rank sends of a token's reductions that are waited for."""
    modules = Wiring.from_json(parse_wiring(wiring), LAYERS, HIDDEN_SIZE).modules
    return Traffic.of([module for module in modules if module.is_exposed], SHARDS, item_bytes=2).bytes_sent / 1024


if __name__ == "__main__":
    main()
