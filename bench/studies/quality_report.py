"""The tables of results/quality, and its picture frontier.png, made from the .jsonl files there.

.venv/bin/python bench/studies/quality_report.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from quality import FILES, KINDS, WINDOWS

from rewired.refit.run import RECIPE

FOLDER = Path(__file__).resolve().parents[2] / "results" / "quality"
DRAWN_SINCE = 6  # the oldest recipe of the picture: later ones give the same but where the first layers are rewired


def main() -> None:
    measured, selected = (_read(FOLDER / f"{name}.jsonl") for name in ("measured", "selected"))
    for path in FOLDER.glob("measured*.jsonl"):
        path.with_suffix(".md").write_text(table(_read(path)))
    for path in FOLDER.glob("whole*.jsonl"):
        path.with_suffix(".md").write_text(whole_table(_read(path)))
    for path in FOLDER.glob("variants*.jsonl"):
        path.with_suffix(".md").write_text(variants_table(_read(path)))
    selected = list({tuple(row[:2]): row for row in selected}.values())
    current = [row for row in selected if row[-1] >= DRAWN_SINCE]
    frontier([row for row in newest(measured) if _is_drawn(row)], current, FOLDER / "frontier.png")
    if selected:
        (FOLDER / "selected.md").write_text(selected_table(selected))


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({(row["wiring"], row["layers"], row["fit"]): row for row in rows}.values())


def _is_drawn(row: dict[str, Any]) -> bool:
    return row["windows"] == WINDOWS and (row["fit"] == "converted" or row["recipe"] >= DRAWN_SINCE)


def _read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def selected_table(rows: list[list[Any]]) -> str:
    """KL of what `rewired select` chose, beside that of the last layers."""
    lines = ["| asked for | layers | waited for | KL prose | chat | code |", "|---|---|---|---|---|---|"]
    for name, which, wiring, exposed, _, on, recipe in rows:
        layers = "; ".join(
            f"{entry['preset']}{' + peek' * entry.get('peek', False)} {entry['layers']}" for entry in wiring
        )
        kls = [f"{on[kind]['kl']:.3f} ± {on[kind]['kl_standard_error']:.3f}" for kind in KINDS]
        lines.append(f"| {' | '.join([name + _of(recipe), f'{which}: {layers}', str(exposed), *kls])} |")
    return "\n".join(lines) + "\n"


def variants_table(rows: list[list[Any]]) -> str:
    """KL of every variant, side by side for the layers that it was tried on."""
    lines = ["| layers | variant | tokens | KL prose | chat | code |", "|---|---|---|---|---|---|"]
    newest = {(row[0], row[1]): row for row in rows}.values()
    for name, layers, tokens, on, recipe, _ in sorted(newest, key=lambda row: row[1]):
        kls = [f"{on[kind]['kl']:.3f}" for kind in KINDS]
        lines.append(f"| {' | '.join([layers, name + _of(recipe), f'{tokens:,}', *kls])} |")
    return "\n".join(lines) + "\n"


def _of(recipe: int) -> str:
    return "" if recipe == RECIPE else f" (recipe {recipe})"


def table(rows: list[dict[str, Any]]) -> str:
    """KL of every row and, in brackets, the share that a refit leaves of the KL right after conversion."""
    converted = {(row["wiring"], row["layers"], row["windows"]): row for row in rows if row["fit"] == "converted"}
    original = rows[-1]["on"]
    lines = [
        "| layers | wiring | waited for | weights | KL prose | chat | code | perplexity prose | chat | code | passes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        "| | original | | original | 0 | 0 | 0 | "
        + " | ".join(f"{original[kind]['perplexity_original']:.1f}" for kind in KINDS)
        + " | |",
    ]
    for row in sorted(newest(rows), key=lambda row: (row["layers"], row["wiring"], row["fit"])):
        before = converted.get((row["wiring"], row["layers"], row["windows"]))
        kls = []
        for kind in KINDS:
            kl = row["on"][kind]["kl"]
            share = f" ({kl / before['on'][kind]['kl']:.3f})" if before and before is not row else ""
            kls.append(f"{kl:.3f}{share}")
        perplexities = [f"{row['on'][kind]['perplexity']:.1f}" for kind in KINDS]
        cells = [
            row["layers"],
            row["wiring"],
            str(row["exposed"]),
            row["fit"] + _mark(row),
            *kls,
            *perplexities,
            f"{row['passes']:g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def whole_table(rows: list[dict[str, Any]]) -> str:
    """KL on the held-out text of every file of the packaged mix, with the number of its tokens."""
    on = rows[-1]["on"]
    names = " | ".join(f"{name} ({on[name]['tokens']:,} tokens)" for name in FILES)
    lines = [f"| layers | wiring | waited for | weights | {names} |", f"|{'---|' * (4 + len(FILES))}"]
    for row in sorted(newest(rows), key=lambda row: (row["layers"], row["wiring"], row["fit"])):
        kls = [f"{row['on'][name]['kl']:.3f} ± {row['on'][name]['kl_standard_error']:.3f}" for name in FILES]
        cells = [row["layers"], row["wiring"], str(row["exposed"]), row["fit"], *kls]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mark(row: dict[str, Any]) -> str:
    """How a row was measured, where that is not how it would be measured now."""
    marks = [f"recipe {row['recipe']}"] if row["recipe"] not in (0, RECIPE) else []
    if row["windows"] != WINDOWS:
        marks.append(f"{row['windows']} windows")
    return f" ({', '.join(marks)})" if marks else ""


def frontier(rows: list[dict[str, Any]], selected: list[list[Any]], path: Path) -> None:
    """KL on prose and chat over the all-reduces that a token waits for: a line a wiring, a point a number of layers.

    A refit's point is that of 64 k tokens where it was measured, else that of 32 k.
    """
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    colours = {name: f"C{number}" for number, name in enumerate(sorted({row["wiring"] for row in rows}))}
    for kind, axis in zip(("prose", "chat"), axes, strict=True):
        for wiring, colour in colours.items():
            of_wiring = [row for row in rows if row["wiring"] == wiring]
            before, after = _line(of_wiring, kind, ("converted",)), _line(of_wiring, kind, ("refit 64k", "refit 32k"))
            axis.plot(*before, "o:", color=colour, markerfacecolor="white", markersize=4, linewidth=0.7, alpha=0.6)
            axis.plot(*after, "o-", color=colour, label=wiring)
        for asked, colour in (("ladder", colours["ladder"]), ("spd", colours["desync-2x"]), ("mix", "black")):
            chosen = [row for row in selected if row[0].startswith(asked) and row[1] == "chosen"]
            points = sorted((row[3], row[5][kind]["kl"]) for row in chosen)
            exposed, kls = [x for x, _ in points], [y for _, y in points]
            axis.plot(exposed, kls, "D--", color=colour, markersize=5, linewidth=1)
        axis.set(yscale="log", title=kind, xlabel="all-reduces that a token waits for (original: 60)")
    axes[0].set_ylabel("KL(original || rewired), nats a token")
    for label, style, colour in (
        ("as converted", "o:", "grey"),
        ("refitted", "o-", "grey"),
        ("refitted, layers chosen", "D--", "grey"),
        ("... and wirings, too", "D--", "black"),
    ):
        face = "white" if label == "as converted" else colour
        axes[0].plot([], [], style, color=colour, markerfacecolor=face, markersize=5, label=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="center right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 0.84, 1))
    figure.savefig(path, dpi=120, metadata={"Software": ""})


def _line(rows: list[dict[str, Any]], kind: str, fits: Sequence[str]) -> tuple[list[int], list[float]]:
    """All-reduces and KL of each number of layers, fewest first, from the first of `fits` that was measured."""
    by_layers = {row["layers"]: row for fit in reversed(fits) for row in rows if row["fit"] == fit}
    ordered = sorted(by_layers.values(), key=lambda row: int(row["layers"].split("-")[0]), reverse=True)
    return [row["exposed"] for row in ordered], [row["on"][kind]["kl"] for row in ordered]


if __name__ == "__main__":
    main()
