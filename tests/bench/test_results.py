"""Rows from samples, by hand; and the file that an interrupted bench goes on from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewired.bench.request import BenchRequest
from rewired.bench.results import Cell, CellFile, median_range, to_json
from rewired.grid.size import TpSize

REQUEST = BenchRequest("tiny", ("ladder", "none"), prompt=8, new=10, rounds=3, device="cpu")
HERE = {"device": "a CPU", "torch": "1"}
SAMPLES = {
    "stock": {"prefill": [2.0, 2.2, 2.4], "decode": [0.2, 0.2, 0.2], "decode_compiled": [0.2, 0.2, 0.2]},
    "standard": {"prefill": [2.0, 2.0, 4.0], "decode": [0.2, 0.3, 0.2], "decode_compiled": [0.2, 0.2, 0.2]},
    "ladder": {"prefill": [1.0, 1.6, 1.25], "decode": [0.1, 0.2, 0.1], "decode_compiled": [0.05, 0.04, 0.06]},
    "none": {"prefill": [1.0, 1.0, 1.0], "decode": [0.1, 0.1, 0.1], "decode_compiled": [0.3, 0.3, 0.3]},
}
SENT = {name: {"prefill": 64.0, "decode": 8.0} for name in SAMPLES}


def row(wiring: str) -> dict[str, Any]:
    rows = to_json(REQUEST, 4, [Cell(2, 3, {"loopback": SAMPLES}, SENT)], {})["rows"]
    found: dict[str, Any] = next(each for each in rows if each["wiring"] == wiring)
    return found


def test_a_row() -> None:
    ladder = row("ladder")
    assert {name: ladder[name] for name in ("model", "layers", "tp", "batch", "prompt", "new", "link")} == {
        "model": "tiny",
        "layers": 4,
        "tp": 2,
        "batch": 3,
        "prompt": 8,
        "new": 10,
        "link": "loopback",
    }
    assert (ladder["prefill_seconds"], ladder["prefill_quartiles"]) == (1.25, [1.125, 1.425])
    assert ladder["decode_compiled_seconds"] == 0.05
    # the faster mode decodes: 1.5, 2.0 and 1.85 seconds for 10 tokens of 3 sequences
    assert ladder["tokens_per_second"] == pytest.approx(30 / 1.85)


def test_speedups_are_medians_of_the_rounds_own_ratios() -> None:
    speedup = row("ladder")["speedup"]
    assert speedup["prefill"] == {"standard": 2.0, "stock": pytest.approx(1.92)}  # of 2, 1.25, 3.2; of 2, 1.375, 1.92
    assert speedup["decode"] == {"standard": 2.0, "stock": 2.0}  # of 2, 1.5, 2
    assert speedup["generation"]["standard"] == pytest.approx(4 / 1.5)  # of 4 / 1.5, 4 / 2, 6 / 1.85


def test_medians_lie_in_ranges_that_narrow_with_the_rounds() -> None:
    assert median_range([3.0, 1.0, 2.0]) == [1.0, 3.0]  # too few for 95 %: all of them
    assert median_range([float(value) for value in range(1, 10)]) == [2.0, 8.0]  # outside is 2 * (1 + 9) / 512
    assert row("ladder")["speedup_range"]["prefill"]["standard"] == [1.25, 3.2]
    assert row("standard")["speedup_range"]["prefill"]["standard"] == [1.0, 1.0]


def test_the_share_that_is_hidden() -> None:
    assert row("ladder")["hidden"] == {"prefill": 0.75, "decode": 1.0}  # (2 - 1.25) / (2 - 1)
    assert row("standard")["hidden"] == {"prefill": 0.0, "decode": 0.0}
    assert row("none")["hidden"] == {"prefill": 1.0, "decode": 1.0}


def test_where_there_is_nothing_to_hide_no_share_is_given() -> None:
    assert "decode_compiled" not in row("ladder")["hidden"]  # none takes longer than standard


def test_what_a_slow_link_adds_and_how_much_of_it_a_wiring_saves() -> None:
    slow = {
        name: {"prefill": [second + added for second in SAMPLES[name]["prefill"]], "decode": SAMPLES[name]["decode"]}
        for name, added in {"stock": 1.0, "standard": 1.0, "ladder": 0.25, "none": 0.0}.items()
    }
    own = {name: {measure: SAMPLES[name][measure] for measure in ("prefill", "decode")} for name in SAMPLES}
    request = replace(REQUEST, link="1gbit")
    rows = to_json(request, 4, [Cell(2, 3, {"loopback": own, "1gbit": slow}, SENT)], {})["rows"]
    saved = {each["wiring"]: each["link_saved"]["prefill"] for each in rows if each["link"] == "1gbit"}
    assert saved == pytest.approx({"stock": 0.0, "standard": 0.0, "ladder": 0.75, "none": 1.0})
    ladder = next(each for each in rows if (each["link"], each["wiring"]) == ("1gbit", "ladder"))
    assert ladder["link_won"]["prefill"] == pytest.approx(1.5)  # of medians: (2 + 1) - (1.25 + 0.25), of 1
    assert ladder["link_adds"] == pytest.approx({"prefill": 0.25, "decode": 0.0})
    assert "decode" not in ladder["link_saved"]  # there it adds nothing that could be saved
    assert not any("link_adds" in each for each in rows if each["link"] == "loopback")


def test_an_all_reduce_that_was_measured_twice_counts_once() -> None:
    cells = [
        Cell(2, batch, {"loopback": SAMPLES}, SENT, [{"gpus": 2, "link": "loopback", "bytes": 4096, "seconds": batch}])
        for batch in (1, 4)
    ]
    assert [entry["seconds"] for entry in to_json(REQUEST, 4, cells, {})["all_reduce"]] == [4]


def test_cells_are_found_again(tmp_path: Path) -> None:
    CellFile(tmp_path, REQUEST, HERE).add(Cell(2, 1, {"loopback": SAMPLES}, SENT))
    CellFile(tmp_path, REQUEST, HERE).add(Cell(2, 4, {"loopback": SAMPLES}, SENT))
    again = CellFile(tmp_path, REQUEST, HERE)
    assert again.cells == [Cell(2, 1, {"loopback": SAMPLES}, SENT), Cell(2, 4, {"loopback": SAMPLES}, SENT)]
    assert again.is_done(TpSize(2), 4)
    assert not again.is_done(TpSize(4), 4)


def test_writing_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = CellFile(tmp_path, REQUEST, HERE)
    measured.add(Cell(2, 1, {"loopback": SAMPLES}, SENT))
    with monkeypatch.context() as broken, pytest.raises(OSError, match="no space"):
        broken.setattr(Path, "replace", fail)
        measured.add(Cell(2, 4, {"loopback": SAMPLES}, SENT))
    assert [cell.batch for cell in CellFile(tmp_path, REQUEST, HERE).cells] == [1]


def fail(*_: object) -> None:
    raise OSError("no space")


def test_another_bench_is_not_mixed_in(tmp_path: Path) -> None:
    CellFile(tmp_path, REQUEST, HERE).add(Cell(2, 1, {"loopback": SAMPLES}, SENT))
    other = BenchRequest("tiny", ("ladder", "none"), prompt=9, new=10, rounds=3, device="cpu")
    with pytest.raises(ValueError, match="with another prompt: give another --out"):
        CellFile(tmp_path, other, HERE)


def test_nor_is_another_machine_or_version(tmp_path: Path) -> None:
    CellFile(tmp_path, REQUEST, HERE).add(Cell(2, 1, {"loopback": SAMPLES}, SENT))
    with pytest.raises(ValueError, match="with another machine's torch: give another --out"):
        CellFile(tmp_path, REQUEST, HERE | {"torch": "2"})


def test_nor_is_another_model_in_the_same_folder(tmp_path: Path) -> None:
    CellFile(tmp_path, REQUEST, HERE, {"config.json": "a"}).add(Cell(2, 1, {"loopback": SAMPLES}, SENT))
    assert CellFile(tmp_path, REQUEST, HERE, {"config.json": "a"}).is_done(TpSize(2), 1)
    for other in ({"config.json": "b"}, None):
        with pytest.raises(ValueError, match="with another config or weights: give another --out"):
            CellFile(tmp_path, REQUEST, HERE, other)


@pytest.mark.parametrize("content", ["{", "[]", '{"request": {}, "tp": 2}', "\xff"])
def test_a_file_that_is_no_record_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "measured.jsonl").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="is not what this version of rewired bench writes: remove it"):
        CellFile(tmp_path, REQUEST, HERE)
