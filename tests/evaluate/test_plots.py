"""What is drawn, and what is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rewired.evaluate.report import markdown, write_report
from rewired.evaluate.results import ModelInfo

from .made_up_results import (
    COMMAND,
    DATE,
    DIVERGENCE,
    MMLU,
    drawn,
    renamed,
    results,
    shares,
)


def test_plots_stand_in_the_report(tmp_path: Path) -> None:
    write_report(results(**shares("MMLU", "PIQA")), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["recovery.png", "tasks.png"]
    text = (tmp_path / "report.md").read_text()
    assert re.findall(r"!\[.*\]\((.*)\)", text) == ["tasks.png", "recovery.png"]
    assert text.startswith(markdown(results(**shares("MMLU", "PIQA")), COMMAND, DATE))


def test_a_divergence_alone_is_drawn_along_training(tmp_path: Path) -> None:
    write_report(results(tasks=[]), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["recovery.png"]


def models(*others: tuple[str, int | None]) -> list[ModelInfo]:
    """The original, and hybrid and tuned with these roles and steps."""
    infos = [
        ModelInfo(name, role, "1" * 64, step) for name, (role, step) in zip(("hybrid", "tuned"), others, strict=True)
    ]
    return [ModelInfo("dense", "original", "0" * 64), *infos]


@pytest.mark.parametrize(
    "among",
    [
        models(("rewired", None), ("rewired", None)),
        models(("rewired", None), ("rewired", 300)),
        models(("rewired", 100), ("control", 100)),
    ],
    ids=["no step", "one step", "one step and the control's, which is another training"],
)
def test_recovery_is_drawn_where_two_models_of_a_training_are_compared(among: list[ModelInfo], tmp_path: Path) -> None:
    write_report(results(**shares("MMLU", "PIQA"), models=among), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["tasks.png"]


@pytest.mark.parametrize(
    "divergences",
    [{}, {"prose.txt": {}}, {"prose.txt": {"tuned": DIVERGENCE}}],
    ids=["no text", "an original from earlier results", "a model from earlier results"],
)
def test_recovery_is_not_drawn_where_there_is_nothing_to_draw(divergences: dict[str, Any], tmp_path: Path) -> None:
    """One task has no average, and earlier results have no weights to measure a divergence with."""
    write_report(results(tasks=[MMLU], divergences=divergences), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["tasks.png"]


def test_a_name_that_looks_like_a_formula_is_drawn(tmp_path: Path) -> None:
    write_report(renamed("$\\frac$"), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["recovery.png", "tasks.png"]
