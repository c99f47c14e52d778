"""Plots of a training's curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_TITLES = {
    "loss": "loss",
    "ce": "ce: cross-entropy with the data",
    "kd": "kd: divergence from the original",
    "hidden": "hidden: relative squared error",
    "held_out_kl": "KL to the original, held out",
}
_COLUMNS = 3
_FEW = 20  # points, which are marked

Curve = list[tuple[int, float]]  # of steps and values


def curves(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the losses per token over steps and, if measured, the KL to the original, to the file `path`.

    Each has a panel of its own, since they differ in scale; one that is the same as the loss shares the loss's.
    """
    panels = _panels(history)
    columns = min(max(len(panels), 1), _COLUMNS)
    rows = max(math.ceil(len(panels) / columns), 1)
    figure, axes = plt.subplots(rows, columns, figsize=(4.5 * columns, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, curve) in zip(axes.flat, panels.items(), strict=False):
        steps, values = zip(*curve, strict=True)
        axis.plot(steps, values, marker="." if len(curve) < _FEW else None)
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if min(values) < max(values) / 2:
            axis.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": ""})
    plt.close(figure)


def _panels(history: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    """What is plotted, by its title."""
    measured = {name: [(entry["step"], entry[name]) for entry in history if name in entry] for name in _TITLES}
    panels = {name: curve for name, curve in measured.items() if curve}
    same = [name for name, curve in panels.items() if name != "loss" and _is_same(curve, measured["loss"])]
    titled = {_TITLES[name]: curve for name, curve in panels.items() if name not in ("loss", *same)}
    if "loss" in panels:
        titled = {" = ".join(["loss", *(_TITLES[name] for name in same)]): panels["loss"], **titled}
    return titled


def _is_same(curve: Curve, other: Curve) -> bool:
    return len(curve) == len(other) and all(
        step == other_step and math.isclose(value, other_value, rel_tol=1e-6)
        for (step, value), (other_step, other_value) in zip(curve, other, strict=True)
    )
