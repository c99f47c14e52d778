"""results/quality: measured.jsonl as a table and as a picture, frontier.png, and variants.jsonl as a table.

.venv/bin/python bench/quality_report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parents[1] / "results" / "quality"
KINDS = ("prose", "chat", "code")


def main() -> None:
    rows = [json.loads(line) for line in (FOLDER / "measured.jsonl").read_text().splitlines()]
    (FOLDER / "measured.md").write_text(table(rows))
    frontier(rows, FOLDER / "frontier.png")
    if (FOLDER / "variants.jsonl").exists():
        variants = [json.loads(line) for line in (FOLDER / "variants.jsonl").read_text().splitlines()]
        (FOLDER / "variants.md").write_text(variants_table(variants))


def variants_table(rows: list[list[Any]]) -> str:
    """KL of every variant, side by side for the layers that it was tried on."""
    lines = ["| layers | variant | tokens | KL prose | chat | code |", "|---|---|---|---|---|---|"]
    for name, layers, tokens, found in sorted(rows, key=lambda row: row[1]):
        kls = [f"{found[kind]['kl']:.3f}" for kind in KINDS]
        lines.append(f"| {' | '.join([layers, name, f'{tokens:,}', *kls])} |")
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """KL of every row, and what the refit leaves of conversion's."""
    converted = {(row["wiring"], row["layers"]): row for row in rows if row["fit"] == "converted"}
    original = rows[0]["on"]
    lines = [
        "| layers | wiring | waited for | weights | KL prose | chat | code | perplexity prose | chat | code | passes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        "| | original | 60 | original | 0 | 0 | 0 | "
        + " | ".join(f"{original[kind]['perplexity_original']:.1f}" for kind in KINDS)
        + " | |",
    ]
    for row in sorted(rows, key=lambda row: (row["layers"], row["wiring"], row["fit"])):
        before = converted.get((row["wiring"], row["layers"]))
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
            row["fit"],
            *kls,
            *perplexities,
            f"{row['passes']:g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def frontier(rows: list[dict[str, Any]], path: Path) -> None:
    """KL on prose and chat over the all-reduces that a token waits for; hollow before the refit, filled after it."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row["wiring"] for row in rows))}
    for kind, axis in zip(("prose", "chat"), axes, strict=True):
        for row in rows:
            is_fitted = row["fit"].startswith("refit")
            if is_fitted or row["fit"] == "converted":
                colour, kl = colours[row["wiring"]], row["on"][kind]["kl"]
                axis.plot(row["exposed"], kl, "o", color=colour, markerfacecolor=colour if is_fitted else "none")
        axis.set(yscale="log", title=kind, xlabel="all-reduces that a token waits for (original: 60)")
    axes[0].set_ylabel("KL(original || rewired), nats a token")
    for name, colour in colours.items():
        axes[1].plot([], [], "o", color=colour, label=name)
    axes[1].plot([], [], "o", color="grey", markerfacecolor="none", label="converted")
    axes[1].plot([], [], "o", color="grey", label="refitted")
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": ""})


if __name__ == "__main__":
    main()
