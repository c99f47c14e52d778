"""`--calibrate`: a machine that was measured is found again, and reports that are none are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewired.checkpoint.named_shapes import named_shapes
from rewired.plan.compute import Rank, Step
from rewired.plan.machine import Machine, serving_machine
from rewired.plan.machine_from_bench import calibrated
from rewired.plan.pass_time import pass_time
from rewired.plan.wirings import wiring_of

MODEL = "llama-3.2-1b"
POWERS = range(9, 31)


def report(machine: Machine) -> dict[str, Any]:
    """What a bench would write on a machine that behaves as predicted."""
    shape, rows = named_shapes()[MODEL], []
    rank = Rank(shape, machine.hardware, machine.engine, machine.tp)
    for wiring in ("standard", "none", "ladder"):
        for batch in (1, 4):
            steps = Step(batch, 1024, 1024), Step(batch, 1, 1025)
            prefill, decode = (
                pass_time(rank, machine.all_reduce, wiring_of(shape, wiring), step, wiring != "none").seconds
                for step in steps
            )
            row = {"wiring": wiring, "model": MODEL, "layers": 16, "tp": machine.tp, "batch": batch, "prompt": 1024}
            rows.append(row | {"prefill_seconds": prefill, "decode_seconds": decode})
    alone = replace(machine.all_reduce, slack=0.0)
    times = [
        {"gpus": machine.tp, "bytes": 2**power, "seconds": alone.seconds(2**power, machine.tp)} for power in POWERS
    ]
    return {"link": None, "request": {"dtype": "bfloat16"}, "rows": rows, "all_reduce": times}


def written(content: Any, folder: Path) -> Path:
    (folder / "results.json").write_text(json.dumps(content))
    return folder / "results.json"


def test_a_machine_is_found_again(tmp_path: Path) -> None:
    """Slower products, slower memory and slower links."""
    machine = serving_machine("h100", "nccl", 8)
    slower = replace(
        machine,
        engine=replace(machine.engine, flops_share=machine.engine.flops_share / 2),
        all_reduce=replace(machine.all_reduce, scale=1.7),
    )
    found = calibrated(machine, written(report(slower), tmp_path))
    assert found.engine.flops_share == pytest.approx(slower.engine.flops_share, rel=0.03)
    assert found.engine.memory_share == pytest.approx(machine.engine.memory_share, rel=0.01)
    assert found.all_reduce.seconds(2**20, 8) == pytest.approx(slower.all_reduce.seconds(2**20, 8), rel=0.01)
    assert found.all_reduce.hide == pytest.approx(machine.all_reduce.hide, abs=0.02)


def test_a_ladder_says_what_hides(tmp_path: Path) -> None:
    machine = serving_machine("h100", "vllm", 8)
    shy = replace(machine, all_reduce=replace(machine.all_reduce, hide=0.1))
    found = calibrated(machine, written(report(shy), tmp_path))
    assert found.all_reduce.hide == pytest.approx(0.1, abs=0.02)


def test_measured_all_reduces_take_the_place_of_ours(tmp_path: Path) -> None:
    machine = serving_machine("h100", "nccl", 2)
    content = report(machine) | {"all_reduce": [{"gpus": 2, "bytes": 2**power, "seconds": 1e-3} for power in (10, 30)]}
    found = calibrated(machine, written(content, tmp_path))
    assert found.all_reduce.seconds(2**20, 2) == pytest.approx(1e-3 + machine.engine.slack)


def test_messages_of_32_bits_count_as_those_of_16(tmp_path: Path) -> None:
    machine = serving_machine("h100", "nccl", 2)
    times = [{"gpus": 2, "bytes": 2**power, "seconds": 2**power * 1e-9} for power in (10, 30)]
    content = report(machine) | {"all_reduce": times, "request": {"dtype": "float32"}}
    found = calibrated(machine, written(content, tmp_path))
    assert found.all_reduce.seconds(2**20, 2) == pytest.approx(2 * 2**20 * 1e-9 + machine.engine.slack)


def test_the_link_that_counts_and_decoding_that_was_compiled(tmp_path: Path) -> None:
    """Rows of another link, and slower eager decoding, change nothing."""
    machine = serving_machine("h100", "nccl", 8)
    slow, own = report(replace(machine, all_reduce=replace(machine.all_reduce, scale=3.0))), report(machine)
    eager = [
        row
        | {f"{measure}_compiled_seconds": row[f"{measure}_seconds"] for measure in ("prefill", "decode")}
        | {f"{measure}_seconds": 9.0 for measure in ("prefill", "decode")}
        for row in slow["rows"]
    ]
    content = slow | {"link": "1gbit", "rows": on_link("1gbit", eager) + on_link("loopback", own["rows"])}
    content["all_reduce"] = on_link("1gbit", slow["all_reduce"]) + on_link("loopback", own["all_reduce"])
    found = calibrated(machine, written(content, tmp_path))
    assert found.all_reduce.seconds(2**20, 8) == pytest.approx(3 * machine.all_reduce.seconds(2**20, 8), rel=0.02)
    assert found.engine.memory_share == pytest.approx(machine.engine.memory_share, rel=0.01)


def on_link(link: str, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry | {"link": link} for entry in entries]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ([], "is not a results.json of `rewired bench`"),
        ({"rows": []}, "is not a results.json of `rewired bench`"),
        ({"link": None, "request": {"dtype": "float32"}, "rows": [], "all_reduce": []}, "has no times of all-reduces"),
    ],
)
def test_what_is_no_report(change: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        calibrated(serving_machine("h100", "nccl", 8), written(change, tmp_path))


@pytest.mark.parametrize("missing", ["none", "prefill"])
def test_what_was_not_measured(missing: str, tmp_path: Path) -> None:
    """A training has no prefill."""
    machine = serving_machine("h100", "nccl", 8)
    content = report(machine)
    content["rows"] = [row for row in content["rows"] if row["wiring"] != missing]
    if missing == "prefill":
        content["rows"] = [{"training_step_seconds": 1.0, "wiring": "none"}]
    with pytest.raises(ValueError, match="has no prefill and decoding of 'none': measure them with rewired bench"):
        calibrated(machine, written(content, tmp_path))
