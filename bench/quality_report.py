"""results/quality: measured.jsonl as a table and, with selected.jsonl, as the picture frontier.png; the other tables.

.venv/bin/python bench/quality_report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from quality import FILES, KINDS, WINDOWS, is_current

from rewired.convert.refit.run import RECIPE

FOLDER = Path(__file__).parents[1] / "results" / "quality"


def main() -> None:
    measured, selected = (_read(FOLDER / f"{name}.jsonl") for name in ("measured", "selected"))
    for path in FOLDER.glob("measured*.jsonl"):
        path.with_suffix(".md").write_text(table(_read(path)))
    for path in FOLDER.glob("whole*.jsonl"):
        path.with_suffix(".md").write_text(whole_table(_read(path)))
    for path in FOLDER.glob("variants*.jsonl"):
        path.with_suffix(".md").write_text(variants_table(_read(path)))
    selected = [row for row in selected if row[-1] == RECIPE]
    frontier([row for row in measured if is_current(row)], selected, FOLDER / "frontier.png")
    if selected:
        (FOLDER / "selected.md").write_text(selected_table(selected))


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({(row["wiring"], row["layers"], row["fit"]): row for row in rows}.values())


def _read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def selected_table(rows: list[list[Any]]) -> str:
    """KL of what `rewired select` chose, beside that of the last layers."""
    lines = ["| asked for | layers | waited for | KL prose | chat | code |", "|---|---|---|---|---|---|"]
    for name, which, wiring, exposed, _, found, _ in rows:
        layers = "; ".join(f"{entry['preset']} {entry['layers']}" for entry in wiring)
        kls = [f"{found[kind]['kl']:.3f} ± {found[kind]['kl_standard_error']:.3f}" for kind in KINDS]
        lines.append(f"| {' | '.join([name, f'{which}: {layers}', str(exposed), *kls])} |")
    return "\n".join(lines) + "\n"


def variants_table(rows: list[list[Any]]) -> str:
    """KL of every variant, side by side for the layers that it was tried on."""
    lines = ["| layers | variant | tokens | KL prose | chat | code |", "|---|---|---|---|---|---|"]
    newest = {(row[0], row[1]): row for row in rows}.values()
    for name, layers, tokens, found, recipe, _ in sorted(newest, key=lambda row: row[1]):
        mark = "" if recipe == RECIPE else f" (recipe {recipe})"
        kls = [f"{found[kind]['kl']:.3f}" for kind in KINDS]
        lines.append(f"| {' | '.join([layers, name + mark, f'{tokens:,}', *kls])} |")
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """KL of every row, and what the refit leaves of conversion's on the same windows."""
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
    """KL on every file of the packaged mix, as far as it is kept back; and the tokens of that."""
    on = rows[-1]["on"]
    names = " | ".join(f"{name} ({on[name]['tokens']:,} tokens)" for name in FILES)
    lines = [f"| layers | wiring | waited for | weights | {names} |", f"|{'---|' * (4 + len(FILES))}"]
    for row in sorted(newest(rows), key=lambda row: (row["layers"], row["wiring"], row["fit"])):
        kls = [f"{row['on'][name]['kl']:.3f} ± {row['on'][name]['kl_standard_error']:.3f}" for name in FILES]
        cells = [row["layers"], row["wiring"], str(row["exposed"]), row["fit"], *kls]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mark(row: dict[str, Any]) -> str:
    """What sets a row apart from those that would be measured now."""
    told = [f"recipe {row['recipe']}"] if row["recipe"] not in (0, RECIPE) else []
    if row["windows"] != WINDOWS:
        told.append(f"{row['windows']} windows")
    return f" ({', '.join(told)})" if told else ""


def frontier(rows: list[dict[str, Any]], selected: list[list[Any]], path: Path) -> None:
    """KL on prose and chat over the all-reduces that a token waits for; hollow before a refit, filled after it (of
    64 k tokens where that was measured, else of 32 k)."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row["wiring"] for row in rows))}
    for kind, axis in zip(("prose", "chat"), axes, strict=True):
        for wiring, layers in dict.fromkeys((row["wiring"], row["layers"]) for row in rows):
            own = [row for row in rows if (row["wiring"], row["layers"]) == (wiring, layers)]
            kls = {row["fit"]: row["on"][kind]["kl"] for row in own}
            colour, best = colours[wiring], "refit 64k" if "refit 64k" in kls else "refit 32k"
            points = [(kls[fit], face) for fit, face in (("converted", "white"), (best, colour)) if fit in kls]
            axis.plot([own[0]["exposed"]] * len(points), [kl for kl, _ in points], "-", color=colour, linewidth=0.8)
            for kl, face in points:
                axis.plot(own[0]["exposed"], kl, "o", color=colour, markerfacecolor=face)
        chosen = sorted(
            (row[3], row[5][kind]["kl"]) for row in selected if row[0].startswith("ladder") and row[1] == "chosen"
        )
        if chosen:
            axis.plot(*zip(*chosen, strict=True), "D--", color=colours["ladder"], linewidth=0.8, markersize=5)
        axis.set(yscale="log", title=kind, xlabel="all-reduces that a token waits for (original: 60)")
    axes[0].set_ylabel("KL(original || rewired), nats a token")
    for name, colour in colours.items():
        axes[0].plot([], [], "o", color=colour, label=name)
    for label, marker, face in (
        ("converted", "o", "white"),
        ("refitted", "o", "grey"),
        ("refitted, layers chosen", "D", "grey"),
    ):
        axes[0].plot([], [], marker, color="grey", markerfacecolor=face, label=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="center right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 0.85, 1))
    figure.savefig(path, dpi=120, metadata={"Software": ""})


if __name__ == "__main__":
    main()
