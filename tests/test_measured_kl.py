"""The packaged KL of wirings, and the verdicts of gates, are what results/quality measured."""

from __future__ import annotations

import csv
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from rewired.measured_kl import smollm2_gates
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import parse_wiring

RESULTS = Path(__file__).parents[1] / "results" / "quality"


def rows(name: str = "measured_kl.csv") -> list[dict[str, str]]:
    text = (files("rewired") / name).read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


CONVERTED = [row for row in rows() if row["basis"] == "none" and row["weights"] == "converted"]
REFITTED = [row for row in rows() if row["basis"] == "none" and row["weights"] == "refit"]
ROTATED = [row for row in rows() if row["basis"] != "none"]


@pytest.mark.parametrize("row", CONVERTED, ids=str)
def test_converted_rows_are_those_of_the_results(row: dict[str, str]) -> None:
    found = [each for each in measured("measured.jsonl") if each["wiring"] == row["wiring"] and each["windows"] == 32]
    (on,) = (each["on"] for each in found if each["fit"] == "converted")
    assert [round(on[kind]["kl"], 3) for kind in ("prose", "chat")] == [float(row["prose"]), float(row["chat"])]


@pytest.mark.parametrize("row", REFITTED, ids=str)
def test_refitted_rows_are_those_of_the_results(row: dict[str, str]) -> None:
    """Those of the newest version that was measured, from the most tokens; the page shows some of them."""
    found = [each for each in measured("measured.jsonl") if each["wiring"] == row["wiring"] and each["windows"] == 32]
    found = [each for each in found if re.fullmatch(r"refit \d+k", each["fit"])]
    on = max(found, key=lambda each: (each["algorithm"], each["fit"]))["on"]
    assert [round(on[kind]["kl"], 3) for kind in ("prose", "chat")] == [float(row["prose"]), float(row["chat"])]
    name, _, layers = row["wiring"].partition("@")
    lines = [re.split(r"\s*\|\s*", line) for line in (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()]
    if line := next((line for line in lines if line[1:3] == [layers, name]), None):
        prose, chat = (float(cell.split("±")[0]) for cell in line[6:8])
        assert (prose, chat) == (float(row["prose"]), float(row["chat"]))


def test_every_refit_that_was_measured_is_there() -> None:
    refits = {each["wiring"] for each in measured("measured.jsonl") if each["fit"].startswith("refit")}
    assert {row["wiring"] for row in REFITTED} == refits == {row["wiring"] for row in CONVERTED}


@pytest.mark.parametrize("row", ROTATED, ids=str)
def test_rotated_rows_are_those_of_the_results(row: dict[str, str]) -> None:
    """Of a refit, the row of the most tokens and windows. A payload alone is not refitted."""
    assert (row["weights"] == "refit") == (not row["wiring"].startswith("standard"))
    each_of = (row["wiring"], row["basis"])
    found = [each for each in measured("rotations.jsonl") if (each["wiring"], each["basis"]) == each_of]
    found = [each for each in found if (each["tokens"] > 0) == (row["weights"] == "refit")]
    on = max(found, key=lambda each: (each["tokens"], each["windows"]))["on"]
    assert [round(on[kind]["kl"], 4) for kind in ("prose", "chat")] == [float(row["prose"]), float(row["chat"])]


def test_every_wiring_was_measured_in_all_layers() -> None:
    """So that none is priced beyond what was measured."""
    names = {row["wiring"].partition("@")[0] for row in rows()}
    assert {row["wiring"] for row in rows() if row["wiring"].endswith("@0-30")} == {f"{name}@0-30" for name in names}


def test_verdicts_are_those_of_the_results() -> None:
    """Of several on the same weights, the newest. studies/quality_report.py writes them."""
    found = {
        (Wiring.from_json(row["wiring"], 30, 576), row.get("weights", ""), row["gate"]): row["verdict"]
        for row in measured("gates.jsonl")
        if "gate" in row
    }
    assert found == {
        (Wiring.from_json(parse_wiring(row["wiring"]), 30, 576), row["weights"], row["gate"]): row["verdict"]
        for row in rows("measured_gates.csv")
    }


def test_a_verdict_is_of_as_large_a_share_of_layers() -> None:
    texts = ("ladder+peek@40-80", "ladder+peek@39-80", "ladder+peek@40-79", "desync-4x@0-40, ladder+peek@40-80")
    found = [smollm2_gates(Wiring.from_json(parse_wiring(text), 80, 8192)) for text in texts]
    assert "recommended: undecided" in found[0] and not any(found[1:])


def measured(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
