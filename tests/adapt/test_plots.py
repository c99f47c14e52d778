"""Curves of a training: each has a panel, and none is hidden under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from rewired.adapt import plots

HISTORY = [{"step": step, "loss": 2.0 / step, "ce": 3.0 + 1 / step, "kd": 2.0 / step} for step in range(1, 40)]


def drawn(monkeypatch: pytest.MonkeyPatch, history: list[dict[str, Any]], path: Path) -> list[Any]:
    """The axes that are saved to `path`."""
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    plots.curves(history, path)
    monkeypatch.undo()
    (figure,) = figures
    return [axis for axis in figure.axes if axis.lines]


def test_a_loss_that_is_the_divergence_is_called_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They were one line over another."""
    history = [*HISTORY, {"step": 0, "held_out_kl": 1.0}, {"step": 39, "held_out_kl": 0.5}]
    axes = drawn(monkeypatch, history, tmp_path / "c.png")
    titles = [axis.get_title() for axis in axes]
    assert titles == [
        "loss = kd: divergence from the original",
        "ce: cross-entropy with the data",
        "KL to the original, held out",
    ]
    assert all(len(axis.lines) == 1 and axis.get_legend() is None for axis in axes)


def test_losses_that_differ_have_a_panel_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    history = [entry | {"loss": entry["ce"] + entry["kd"] + 0.1, "hidden": 0.1} for entry in HISTORY]
    titles = [axis.get_title().partition(":")[0] for axis in drawn(monkeypatch, history, tmp_path / "c.png")]
    assert titles == ["loss", "ce", "kd", "hidden"]


@pytest.mark.parametrize("history", [[], HISTORY[:1]], ids=["nothing", "a step"])
def test_a_short_training_is_drawn(history: list[dict[str, Any]], tmp_path: Path) -> None:
    plots.curves(history, tmp_path / "c.png")
    assert matplotlib.image.imread(tmp_path / "c.png").size
