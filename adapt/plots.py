"""Plots of a training's curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_PANELS = {"loss": ("loss", "ce", "kd", "hidden"), "KL to the original, held out": ("held_out_kl",)}


def curves(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the losses per token over steps and, if measured, the KL to the original, to the file `path`."""
    known = {name for entry in history for name in entry}
    panels = [(title, [n for n in names if n in known]) for title, names in _PANELS.items() if known & set(names)]
    figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(6 * max(len(panels), 1), 4), squeeze=False)
    for axis, (title, names) in zip(axes[0], panels, strict=False):
        for name in names:
            points = [(entry["step"], entry[name]) for entry in history if name in entry]
            axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 20 else None)
        axis.set(title=title, xlabel="step", ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": ""})
    plt.close(figure)
