"""The report's tables, from results that are written here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rewired.bench.report import markdown, print_report, tables
from rewired.bench.results import Cell, to_json
from tests.bench.test_results import REQUEST, SAMPLES, SENT

OWN = {name: {measure: samples[measure] for measure in ("prefill", "decode")} for name, samples in SAMPLES.items()}
SLOW = {
    name: {measure: [2 * second for second in seconds] for measure, seconds in samples.items()}
    for name, samples in OWN.items()
}
ALL_REDUCE = [
    {"gpus": 2, "link": link, "bytes": size, "seconds": seconds, "quartiles": [seconds, seconds]}
    for link, seconds in {"loopback": 1e-4, "1gbit": 2e-4}.items()
    for size in (4096, 16384)
]
HEADER = {"command": "rewired bench tiny", "environment": {"date": "2026-01-01", "device": "a CPU", "torch": "2"}}
RESULTS = to_json(
    replace(REQUEST, link="1gbit"), 4, [Cell(2, 3, {"loopback": OWN, "1gbit": SLOW}, SENT, ALL_REDUCE)], HEADER
)


def test_the_tables() -> None:
    own, slow, link, all_reduces = tables(RESULTS)
    assert own.title == "TP 2, batch 3, loopback"
    assert own.headings == [
        "wiring",
        "prefill ms",
        "x",
        "token ms",
        "x",
        "tokens/s",
        "x",
        "hidden: prefill",
        "hidden: token",
    ]
    wirings = {row[0]: row[1:] for row in own.rows}
    assert wirings["ladder"] == ["1,250 ±12%", "2.00", "100 ±25%", "2.00", "13.3", "2.00", "75%", "100%"]
    assert wirings["none"][-2:] == wirings["stock"][-2:] == ["", ""]  # shares that say nothing
    assert slow.title == "TP 2, batch 3, 1gbit"
    assert link.headings == [
        "wiring",
        "prefill ms",
        "won",
        "saved",
        "bytes saved",
        "token ms",
        "won",
        "saved",
        "bytes saved",
    ]
    ladder = next(row for row in link.rows if row[0] == "ladder")
    assert ladder == ["ladder", "1,250", "75%", "38%", "0%", "100", "100%", "50%", "0%"]
    assert all_reduces.headings == ["bytes", "loopback, 2 ranks", "1gbit, 2 ranks"]
    assert list(all_reduces.rows) == [["4,096", "100", "200"], ["16,384", "100", "200"]]


def test_a_speedup_that_rounds_leave_open_is_not_ranked() -> None:
    """Issue 48: a bench with a spread of 150 % ranked all the same."""
    noisy = {name: dict(samples) for name, samples in OWN.items()}
    noisy["ladder"]["decode"] = [0.1, 0.5, 0.1]
    results = to_json(REQUEST, 4, [Cell(2, 3, {"loopback": noisy}, SENT)], HEADER)
    ladder = next(row for row in next(tables(results)).rows if row[0] == "ladder")
    assert ladder[2:5:2] == ["2.00", "inconclusive"]


def test_markdown_has_the_command_the_machine_and_all_tables() -> None:
    text = markdown(RESULTS)
    assert text.startswith("# tiny: what each wiring takes\n\n`rewired bench tiny`, 2026-01-01; a CPU, torch 2.")
    assert text.count("\n| wiring | ") == 3
    assert "| bytes | loopback, 2 ranks | 1gbit, 2 ranks |\n|---|---|---|\n| 4,096 | 100 | 200 |" in text


def test_a_narrow_terminal_shows_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(RESULTS)
    assert "…" not in capsys.readouterr().out
