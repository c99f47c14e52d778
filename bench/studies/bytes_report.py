"""The picture results/quality/bytes.png: KL over the bytes that a token waits for, from the .jsonl files there.

.venv/bin/python bench/studies/bytes_report.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import rotations
from quality import FOLDER, WIRINGS, is_current
from quality_report import newest, panels, read, save, wiring_colours

from rewired.convert.traffic import Traffic
from rewired.model.wiring import Wiring
from rewired.refit.run import ALGORITHM_VERSION

LAYERS, HIDDEN_SIZE, SHARDS = 30, 576, 3  # SmolLM2-135M's
WHOLE, UPPER = "0-30", "15-30"
PARTIAL = "partial-0.5"
BESIDE = ("", "desync-2x", "ladder", "ladder + peek")  # what a payload is combined with, as rows name it


class Point(NamedTuple):
    kib: float
    on: Mapping[str, Any]
    note: str = ""


class Series(NamedTuple):
    """Points that have one entry in the legend, as matplotlib draws them."""

    label: str
    style: str
    colour: str
    points: Sequence[Point]
    is_refitted: bool = True


def main() -> None:
    measured = [row for row in newest(read(FOLDER / "measured.jsonl")) if is_current(row)]
    rotated = [row for row in read(FOLDER / "rotations.jsonl") if row["recipe"] == ALGORITHM_VERSION]
    refitted = {row["wiring"] for row in measured if row["fit"] != "converted"}
    colours = wiring_colours([row for row in measured if row["wiring"] in refitted])
    drawn = [
        *_wirings(measured, colours),
        *_beside_a_wiring(rotated, colours),
        *_partial(rotated, colours),
        *_payloads(rotated),
        *_masks(),
    ]
    whole = _kib([])
    figure, axes = panels(f"KiB that a token waits for, sent by each rank (original: {whole:.0f})")
    for kind, axis in axes.items():
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        for series in (series for series in drawn if series.points):
            kls = [point.on[kind]["kl"] for point in series.points]
            face = series.colour if series.is_refitted else "white"
            kib = [point.kib for point in series.points]
            style = {"color": series.colour, "markerfacecolor": face, "markersize": 6, "linewidth": 1}
            axis.plot(kib, kls, series.style, label=series.label, **style)
            for point, kl in zip(series.points, kls, strict=True):
                axis.annotate(point.note, (point.kib, kl), (-5, -9), textcoords="offset points", fontsize=7, ha="right")
        axis.plot([], [], "o", color="grey", markerfacecolor="white", label="open: as converted")
    save(figure, FOLDER / "bytes.png")


def _wirings(rows: Sequence[dict[str, Any]], colours: Mapping[str, str]) -> list[Series]:
    """Wirings without a payload, refitted, of half of the layers and of all; on the most tokens that were measured."""
    of_wiring: dict[str, dict[str, Point]] = {}
    for fit in ("refit 32k", "refit 64k"):
        for row in rows:
            if row["fit"] == fit and row["layers"] in (WHOLE, UPPER):
                kib = _kib([WIRINGS[row["wiring"]] | {"layers": row["layers"]}])
                of_wiring.setdefault(row["wiring"], {})[row["layers"]] = Point(kib, row["on"])
    return [Series(name, "o-", colours[name], list(points.values())) for name, points in sorted(of_wiring.items())]


def _beside_a_wiring(rows: Sequence[dict[str, Any]], colours: Mapping[str, str]) -> list[Series]:
    """Payloads of what is else a wiring of its own: rotated, refitted on the most tokens."""
    found = []
    for name in BESIDE:
        points: dict[str, dict[str, Point]] = defaultdict(dict)
        for row in sorted(rows, key=lambda row: row["tokens"]):
            wiring, _, payload = row["wiring"].rpartition(" ")
            if wiring == name and payload.startswith("int") and row["tokens"]:
                layers = UPPER if row["layers"] == UPPER else WHOLE
                note = payload if row["layers"] == layers else f"{payload}, {row['layers']}"
                points[layers][note] = _point(row, note)
        known_as = name.replace(" + ", "-") or "standard"
        label, colour = f"{known_as} + payload", colours.get(known_as, "black")
        found += [
            Series(label, "s--", colour, _by_bytes(points[WHOLE].values())),
            Series(f"{label}, layers {UPPER}", "d:", colour, _by_bytes(points[UPPER].values())),
        ]
    return found


def _partial(rows: Sequence[dict[str, Any]], colours: Mapping[str, str]) -> list[Series]:
    label = "partial, first what is missing"
    points = [
        _point(row, row["wiring"].removeprefix("partial "))
        for row in rows
        if row["wiring"] in ("partial 0.5", "partial 0.25") and row["basis"] == "missing" and row["tokens"]
    ]
    return [Series(label, "^-", colours[PARTIAL], _by_bytes(points))]


def _payloads(rows: Sequence[dict[str, Any]]) -> list[Series]:
    """Of layers that are else standard, as converted."""
    found = []
    for basis, label, style in (("hadamard", "payload, rotated", "s-"), ("none", "payload", "s:")):
        points = [
            _point(row, row["wiring"] * (basis == "hadamard"))
            for row in rows
            if row["wiring"].startswith("int") and row["layers"] == WHOLE
            if (row["basis"], row["tokens"]) == (basis, 0)
        ]
        found.append(Series(label, style, "black", _by_bytes(points), is_refitted=False))
    return found


def _masks() -> list[Series]:
    whole = _kib([])
    found = []
    kinds = (("top-k", False, "x"), ("top-k", True, "*"), ("random", False, "+"))
    for kind, stays_local, marker in kinds:
        label = {"top-k": "Top-K mask", "random": "random mask"}[kind] + ", rest stays local" * stays_local
        rows = [row for row in read(FOLDER / "masks.jsonl") if (row["kind"], row["stays_local"]) == (kind, stays_local)]
        points = [Point(whole * row["bytes"], row["on"]) for row in rows]
        found.append(Series(label, f"{marker}:", "grey", _by_bytes(points), is_refitted=False))
    return found


def _point(row: dict[str, Any], note: str) -> Point:
    return Point(_kib(rotations.entries(row)), row["on"], note)


def _by_bytes(points: Iterable[Point]) -> list[Point]:
    return sorted(points, key=lambda point: -point.kib)


def _kib(entries: Sequence[Mapping[str, Any]]) -> float:
    """What each rank sends of a token's reductions that are waited for."""
    modules = Wiring.from_json(entries, LAYERS, HIDDEN_SIZE).modules
    return Traffic.of([module for module in modules if module.is_exposed], SHARDS, item_bytes=2).bytes_sent / 1024


if __name__ == "__main__":
    main()
