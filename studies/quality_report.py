"""The tables of results/quality, its pictures frontier.png and bytes.png, and the verdicts that come with the package,
made from the .jsonl files there.

.venv/bin/python studies/quality_report.py
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from quality import FILES, FOLDER, KINDS, LAYERS, WINDOWS, is_current, kls_with_errors, put_tables, read

from rewired.convert.traffic import Traffic
from rewired.model.presets import STANDARD
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import parse_wiring, wiring_text
from rewired.refit.run import ALGORITHM_VERSION
from rewired.tables import markdown

HIDDEN_SIZE, SHARDS = 576, 3  # SmolLM2-135M's
VERDICTS = FOLDER.parents[1] / "src" / "rewired" / "measured_gates.csv"
PAYLOADS = {"": "o", "int8": "s", "int6": "P", "int4/int8": "D", "int4": "v"}  # and their markers
PARTIAL = {"none": "o", "missing": "^"}  # by basis
ROTATED, NOT_ROTATED, ANY = "black", "tab:cyan", "grey"  # colours of what is no wiring


def main() -> None:
    measured = newest([row for row in read(FOLDER / "measured.jsonl") if is_current(row)])
    selected = [row for row in read(FOLDER / "selected.jsonl") if row[-1] == ALGORITHM_VERSION]
    put_tables(FOLDER / "measured.md", table(measured))
    put_tables(FOLDER / "whole.md", whole_table(read(FOLDER / "whole.jsonl")))
    put_tables(FOLDER / "selected.md", selected_table(selected))
    package_verdicts(read(FOLDER / "gates.jsonl"))
    rows = measured + [_last(row) for row in selected if row[1] == "last"]
    refitted = {kind(row) for row in rows if row["fit"] != "converted"}
    frontier([row for row in rows if kind(row) in refitted], selected, FOLDER / "frontier.png")
    over_bytes(FOLDER / "bytes.png")


def package_verdicts(rows: list[dict[str, Any]]) -> None:
    """The newest verdict of each gate on each wiring and its weights."""
    verdicts = {}
    for row in (row for row in rows if "gate" in row):
        wiring = wiring_text(Wiring.from_json(row["wiring"], LAYERS, HIDDEN_SIZE).rewired_regions)
        verdicts[wiring, LAYERS, row.get("weights", ""), row["gate"]] = row["verdict"]
    with VERDICTS.open("w", encoding="utf-8", newline="") as file:
        file.write(
            "# Verdicts of gates on SmolLM2-135M-Instruct (30 layers, 3 shards). Weights without a name are those that "
            "plan's commands make. Source: results/quality/gates.jsonl\n"
        )
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["wiring", "layers", "weights", "gate", "verdict"])
        table.writerows([*key, verdict] for key, verdict in verdicts.items())


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({(row["wiring"], row["fit"]): row for row in rows}.values())


def kind(row: dict[str, Any]) -> str:
    """Its wiring less the layers."""
    return str(row["wiring"]).partition("@")[0]


def layers(row: dict[str, Any]) -> str:
    return str(row["wiring"]).partition("@")[2]


def _place(row: dict[str, Any]) -> tuple[str, str, str]:
    """Of a row in a table."""
    return layers(row), kind(row), row["fit"]


def _last(row: list[Any]) -> dict[str, Any]:
    """The last layers of `selected.jsonl` as a row of `measured.jsonl`."""
    return {"wiring": row[2], "fit": "refit 32k", "exposed": row[3], "on": row[5]}


def selected_table(rows: list[list[Any]]) -> str:
    """KL of what `rewired select` chose, beside that of the last layers."""
    cells = [
        [name, f"{which}: {wiring}", str(exposed), *kls_with_errors(on, KINDS)]
        for name, which, wiring, exposed, _, on, _ in rows
    ]
    return markdown(["asked for", "wiring", "exposed", "KL prose", "chat", "code"], cells)


def table(rows: list[dict[str, Any]]) -> str:
    """KL of every row and, in brackets, the share that a refit leaves of the KL right after conversion."""
    converted = {row["wiring"]: row["on"] for row in rows if row["fit"] == "converted"}
    cells = []
    for row in sorted(rows, key=_place):
        kls = [row["on"][kind]["kl"] for kind in KINDS]
        shares = [kl / converted[row["wiring"]][kind]["kl"] for kl, kind in zip(kls, KINDS, strict=True)]
        bracketed = [f" ({share:.3f})" * (row["fit"] != "converted") for share in shares]
        of_kinds = [f"{kl:.3f}{share}" for kl, share in zip(kls, bracketed, strict=True)]
        about = [row["wiring"], str(row["exposed"]), row["fit"]]
        cells.append([*about, *of_kinds, f"{row['passes']:g}" if row["passes"] else ""])
    return markdown(["wiring", "exposed", "weights", "KL prose", "chat", "code", "passes"], cells)


def whole_table(rows: list[dict[str, Any]]) -> str:
    """KL on the held-out text of every file of the packaged mix, with the number of its tokens."""
    names = [f"{name} ({rows[-1]['on'][name]['tokens']:,} tokens)" for name in FILES]
    cells = [
        [row["wiring"], str(row["exposed"]), row["fit"], *kls_with_errors(row["on"], FILES)]
        for row in sorted(newest(rows), key=_place)
    ]
    return markdown(["wiring", "exposed", "weights", *names], cells)


def frontier(rows: list[dict[str, Any]], selected: list[list[Any]], path: Path) -> None:
    """KL on prose and chat over the exposed all-reduces of a token: a line a wiring, over counts of layers.

    A refit's point is that of 64 k tokens where it was measured, else that of 32 k.
    """
    figure, axes = panels("exposed all-reduces a token (original: 60)")
    colours = wiring_colours(rows)
    for text, axis in axes.items():
        for wiring, colour in colours.items():
            of_wiring = [row for row in rows if kind(row) == wiring]
            before, after = _line(of_wiring, text, ("converted",)), _line(of_wiring, text, ("refit 64k", "refit 32k"))
            axis.plot(*before, "o:", color=colour, markerfacecolor="white", markersize=4, linewidth=0.7, alpha=0.6)
            axis.plot(*after, "o-", color=colour, label=wiring)
        for asked, colour in ((name, colours[name]) for name in ("ladder", "desync-2x")):
            chosen = [row for row in selected if row[0].startswith(asked) and row[1] == "chosen"]
            points = sorted((row[3], row[5][text]["kl"]) for row in chosen)
            exposed, kls = [x for x, _ in points], [y for _, y in points]
            axis.plot(exposed, kls, "D--", color=colour, markersize=5, linewidth=1)
    for label, style, colour in (
        ("as converted", "o:", "grey"),
        ("refitted", "o-", "grey"),
        ("refitted, layers chosen", "D--", "grey"),
    ):
        face = "white" if label == "as converted" else colour
        axes["prose"].plot([], [], style, color=colour, markerfacecolor=face, markersize=5, label=label)
    save(figure, path)


def wiring_colours(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {name: f"C{number}" for number, name in enumerate(sorted({kind(row) for row in rows}))}


def panels(xlabel: str) -> tuple[Figure, dict[str, Axes]]:
    """KL upwards, a panel each for prose and chat."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    axes[0].set_ylabel("KL(original || rewired), nats per token")
    for kind, axis in zip(("prose", "chat"), axes, strict=True):
        axis.set(yscale="log", title=kind, xlabel=xlabel)
    return figure, dict(zip(("prose", "chat"), axes, strict=True))


def save(figure: Figure, path: Path) -> None:
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": ""})


def _line(rows: list[dict[str, Any]], text: str, fits: Sequence[str]) -> tuple[list[int], list[float]]:
    """All-reduces and KL of each number of layers, fewest first, from the first of `fits` that was measured."""
    by_layers = {layers(row): row for fit in reversed(fits) for row in rows if row["fit"] == fit}
    ordered = sorted(by_layers.values(), key=lambda row: int(layers(row).split("-")[0]), reverse=True)
    return [row["exposed"] for row in ordered], [row["on"][text]["kl"] for row in ordered]


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


def over_bytes(path: Path) -> None:
    """KL on prose and chat over the bytes that a token waits for: wirings, payloads, and partial reductions."""
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
    save(figure, path)


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
