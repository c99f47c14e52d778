"""results/adapt-smollm2: measured.jsonl as the picture kl.png.

.venv/bin/python studies/adapt_report.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from quality import read

FOLDER = Path(__file__).parents[1] / "results" / "adapt-smollm2"
MODELS = (
    *(f"{wiring}@15-30" for wiring in ("desync-2x", "ladder+peek", "desync-4x", "ladder", "partial-0.5")),
    *(f"{wiring}@0-30" for wiring in ("ladder+peek", "ladder")),
    "dense",
)
STEPS = {  # how a model was made, and its marker
    "converted": ("o", "white"),
    "SFT": ("X", "C1"),
    "distillation": ("v", "C2"),
    "refit": ("o", "C7"),
    "refit + distillation": ("o", "C0"),
    "refit + distillation, half of it plain texts": ("*", "C3"),
}


def main() -> None:
    draw({row["name"]: row["on"] for row in read(FOLDER / "measured.jsonl")}, FOLDER / "kl.png")


def draw(measured: dict[str, Any], path: Path) -> None:
    """KL on prose and chat: a row for each model, a mark for each way to make it; bars are standard errors."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharex=True, sharey=True)
    for kind, axis in zip(("prose", "chat"), axes, strict=True):
        for height, model in enumerate(reversed(MODELS)):
            on = {step: measured[f"{model}, {step}"][kind] for step in STEPS if f"{model}, {step}" in measured}
            axis.plot([one["kl"] for one in on.values()], [height] * len(on), color="lightgrey", zorder=1)
            for step, one in on.items():
                marker, colour = STEPS[step]
                axis.errorbar(
                    x=one["kl"],
                    y=height,
                    xerr=one["kl_standard_error"],
                    fmt=marker,
                    markersize=12 if marker == "*" else 8,
                    color=colour,
                    markeredgecolor="black",
                    ecolor="black",
                )
        axis.set(xscale="log", title=kind, xlabel="KL(original || model), nats per token")
    axes[0].set_yticks(range(len(MODELS)), MODELS[::-1])
    for step, (marker, colour) in STEPS.items():
        axes[0].plot([], [], marker, color=colour, markeredgecolor="black", label=step)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    figure.savefig(path, dpi=120, metadata={"Software": ""})


if __name__ == "__main__":
    main()
