"""The packaged frontier says what results/quality measured."""

from __future__ import annotations

import csv
import re
from importlib.resources import files
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results" / "quality" / "README.md"
LABELS = {"ladder-peek": "ladder + peek", "partial-0.5": "partial 0.5"}


def rows() -> list[dict[str, str]]:
    text = (files("rewired.plan") / "frontier.csv").read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


@pytest.mark.parametrize("row", [row for row in rows() if row["weights"] == "refit"], ids=str)
def test_refitted_rows_are_those_of_the_results(row: dict[str, str]) -> None:
    layers, label = f"{row['first']}-{row['layers']}", LABELS.get(row["wiring"], row["wiring"])
    lines = [re.split(r"\s*\|\s*", line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    line = next(line for line in lines if line[1:3] == [layers, label])
    prose, chat = (float(cell.split(" ± ")[0]) for cell in line[6:8])
    assert (prose, chat) == (float(row["prose"]), float(row["chat"]))
