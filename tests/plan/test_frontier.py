"""The packaged frontier says what results/quality measured."""

from __future__ import annotations

import csv
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results" / "quality"


def rows() -> list[dict[str, str]]:
    text = (files("rewired.plan") / "frontier.csv").read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


REFITTED = [row for row in rows() if row["basis"] == "none" and row["weights"] == "refit"]
ROTATED = [row for row in rows() if row["basis"] != "none"]


@pytest.mark.parametrize("row", REFITTED, ids=str)
def test_refitted_rows_are_those_of_the_results(row: dict[str, str]) -> None:
    name, _, layers = row["wiring"].partition("@")
    lines = [re.split(r"\s*\|\s*", line) for line in (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()]
    line = next(line for line in lines if line[1:3] == [layers, name])
    prose, chat = (float(cell.split(" ± ")[0]) for cell in line[6:8])
    assert (prose, chat) == (float(row["prose"]), float(row["chat"]))


@pytest.mark.parametrize("row", ROTATED, ids=str)
def test_rotated_rows_are_those_of_the_results(row: dict[str, str]) -> None:
    """Of a refit, the row of the most tokens and windows."""
    measured = [json.loads(line) for line in (RESULTS / "rotations.jsonl").read_text().splitlines()]
    found = [each for each in measured if (each["wiring"], each["basis"]) == (row["wiring"], row["basis"])]
    found = [each for each in found if (each["tokens"] > 0) == (row["weights"] == "refit")]
    on = max(found, key=lambda each: (each["tokens"], each["windows"]))["on"]
    assert [round(on[kind]["kl"], 4) for kind in ("prose", "chat")] == [float(row["prose"]), float(row["chat"])]
