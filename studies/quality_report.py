"""Tables of results/quality, its picture frontier.png, and the verdicts that come with the package, all made from the
.jsonl files there.

.venv/bin/python studies/quality_report.py
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from quality import FILES, FOLDER, KINDS, LAYERS, WITHOUT_LISTS, is_current, kls_with_errors, put_tables, read

from rewired.model.wiring import Wiring
from rewired.model.wiring_text import wiring_text
from rewired.tables import markdown

HIDDEN_SIZE = 576  # SmolLM2-135M's
VERDICTS = FOLDER.parents[1] / "src" / "rewired" / "measured_gates.csv"


def main() -> None:
    measured = newest([row for row in read(FOLDER / "measured.jsonl") if is_current(row, since=WITHOUT_LISTS)])
    selected = [row for row in read(FOLDER / "selected.jsonl") if row[-1] == WITHOUT_LISTS]
    put_tables(FOLDER / "measured.md", table(measured))
    put_tables(FOLDER / "whole.md", whole_table(read(FOLDER / "whole.jsonl")))
    package_verdicts(read(FOLDER / "gates.jsonl"))
    rows = measured + [_last(row) for row in selected if row[1] == "last"]
    refitted = {kind(row) for row in rows if row["fit"] != "converted"}
    frontier([row for row in rows if kind(row) in refitted], selected, FOLDER / "frontier.png")


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


def table(rows: list[dict[str, Any]]) -> str:
    """KL of every row and, in brackets, the share that a refit leaves of the KL right after conversion."""
    converted = {row["wiring"]: row["on"] for row in rows if row["fit"] == "converted"}
    cells = []
    for row in sorted(rows, key=_place):
        kls = [row["on"][kind]["kl"] for kind in KINDS]
        shares = [kl / converted[row["wiring"]][kind]["kl"] for kl, kind in zip(kls, KINDS, strict=True)]
        bracketed = [f" ({share:.3f})" * (row["fit"] != "converted") for share in shares]
        of_kinds = [f"{kl:.3f}{share}" for kl, share in zip(kls, bracketed, strict=True)]
        version = f", version {WITHOUT_LISTS}" * (row["algorithm"] == WITHOUT_LISTS)
        about = [row["wiring"], str(row["exposed"]), row["fit"] + version]
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
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    axes[0].set_ylabel("KL(original || rewired), nats per token")
    colours = {name: f"C{number}" for number, name in enumerate(sorted({kind(row) for row in rows}))}
    for text, axis in zip(("prose", "chat"), axes, strict=True):
        axis.set(yscale="log", title=text, xlabel="exposed all-reduces a token (original: 60)")
        for wiring, colour in colours.items():
            of_wiring = [row for row in rows if kind(row) == wiring]
            before, after = _line(of_wiring, text, ("converted",)), _line(of_wiring, text, ("refit 64k", "refit 32k"))
            axis.plot(*before, "o:", color=colour, markerfacecolor="white", markersize=4, linewidth=0.7, alpha=0.6)
            axis.plot(*after, "o-", color=colour, label=wiring)
        for asked in ("ladder", "desync-2x"):
            chosen = [row for row in selected if row[0].startswith(asked) and row[1] == "chosen"]
            points = sorted((row[3], row[5][text]["kl"]) for row in chosen)
            axis.plot(*zip(*points, strict=True), "D--", color=colours[asked], markersize=5, linewidth=1)
    for label, style, face in (
        ("as converted", "o:", "white"),
        ("refitted", "o-", "grey"),
        ("refitted, layers chosen", "D--", "grey"),
    ):
        axes[0].plot([], [], style, color="grey", markerfacecolor=face, markersize=5, label=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": ""})


def _line(rows: list[dict[str, Any]], text: str, fits: Sequence[str]) -> tuple[list[int], list[float]]:
    """All-reduces and KL of each number of layers, fewest first, from the first of `fits` that was measured."""
    by_layers = {layers(row): row for fit in reversed(fits) for row in rows if row["fit"] == fit}
    ordered = sorted(by_layers.values(), key=lambda row: int(layers(row).split("-")[0]), reverse=True)
    return [row["exposed"] for row in ordered], [row["on"][text]["kl"] for row in ordered]


if __name__ == "__main__":
    main()
