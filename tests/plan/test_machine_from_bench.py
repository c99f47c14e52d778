"""`--calibrate`: a machine that was measured is found again, and reports that are none are refused."""

from __future__ import annotations

import json
import re
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
            row = {"wiring": wiring, "model": MODEL, "tp": machine.tp, "batch": batch, "prompt": 1024}
            rows.append(row | {"prefill_seconds": prefill, "decode_seconds": decode})
    return {"rows": rows}


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
    assert found.all_reduce.scale == pytest.approx(1.7, rel=0.01)
    assert found.all_reduce.hide == machine.all_reduce.hide


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


def test_all_reduces_measured_over_two_nodes_have_the_network_in_them(tmp_path: Path) -> None:
    machine = serving_machine("h100", "nccl", 16)
    times = [{"gpus": 16, "bytes": 2**power, "seconds": 1e-3} for power in (10, 30)]
    found = calibrated(machine, written(report(machine) | {"all_reduce": times}, tmp_path)).all_reduce
    assert found.seconds(2**20, 16) == pytest.approx(1e-3 + machine.engine.slack)
    assert found.latency(2**20, 16) == pytest.approx(1e-3)
    assert found.quantised_seconds(2**20, 16) == pytest.approx(1e-3 + 2 * machine.engine.slack)


@pytest.mark.parametrize(("measured", "tp", "missing"), [(2, 8, 8), (2, 16, 8), (16, 8, 8), (16, 32, 8), (4, 8, 8)])
def test_all_reduces_of_other_ranks_are_refused(measured: int, tp: int, missing: int, tmp_path: Path) -> None:
    machine = serving_machine("h100", "nccl", measured)
    times = [{"gpus": measured, "bytes": 2**power, "seconds": 1e-3} for power in (10, 30)]
    file = written(report(machine) | {"all_reduce": times}, tmp_path)
    sentence = f"{file} has all-reduces of {measured} ranks, and none of {missing}: bench with --tp {missing}, or give "
    with pytest.raises(ValueError, match=re.escape(f"{sentence}--tp {measured} here.")):
        calibrated(serving_machine("h100", "nccl", tp), file)
    calibrated(machine, file)


def test_those_of_a_node_serve_for_several(tmp_path: Path) -> None:
    """And for fewer ranks than were measured; one rank needs none."""
    machine = serving_machine("h100", "nccl", 8)
    times = [{"gpus": 8, "bytes": 2**power, "seconds": 1e-3} for power in (10, 30)]
    file = written(report(machine) | {"all_reduce": times}, tmp_path)
    assert calibrated(serving_machine("h100", "nccl", 16), file).all_reduce.seconds(2**20, 16) > 1e-3
    assert calibrated(serving_machine("h100", "nccl", 4), file).all_reduce.within_node(2**20, 4) == pytest.approx(1e-3)
    assert calibrated(serving_machine("h100", "nccl", 1), file).all_reduce.seconds(2**20, 1) == 0


def test_messages_of_32_bits_count_as_those_of_16(tmp_path: Path) -> None:
    machine = serving_machine("h100", "nccl", 2)
    times = [{"gpus": 2, "bytes": 2**power, "seconds": 2**power * 1e-9} for power in (10, 30)]
    content = report(machine) | {"all_reduce": times, "request": {"dtype": "float32"}}
    found = calibrated(machine, written(content, tmp_path))
    assert found.all_reduce.seconds(2**20, 2) == pytest.approx(2 * 2**20 * 1e-9 + machine.engine.slack)


def test_the_link_that_counts_and_decoding_that_was_compiled(tmp_path: Path) -> None:
    """Rows of another link, and slower eager decoding, change nothing."""
    machine = serving_machine("h100", "nccl", 8)
    shy = replace(machine, all_reduce=replace(machine.all_reduce, scale=3.0))
    eager = [
        row
        | {"link": "1gbit"}
        | {f"{measure}_compiled_seconds": row[f"{measure}_seconds"] for measure in ("prefill", "decode")}
        | {f"{measure}_seconds": 9.0 for measure in ("prefill", "decode")}
        for row in report(shy)["rows"]
    ]
    other = [row | {"link": "loopback"} for row in report(machine)["rows"]]
    found = calibrated(machine, written({"link": "1gbit", "rows": [*eager, *other]}, tmp_path))
    assert found.all_reduce.scale == pytest.approx(3.0, rel=0.01)
    assert found.engine.memory_share == pytest.approx(machine.engine.memory_share, rel=0.01)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ([], "holds no 'rows'"),
        ({"rows": []}, "has no run of 'none' beside one of 'standard'"),
        ({"rows": [{"wiring": "none"}]}, "has a row without wiring, model, tp"),
        ({"rows": "all"}, "holds no 'rows'"),
    ],
)
def test_what_is_no_report(change: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        calibrated(serving_machine("h100", "nccl", 8), written(change, tmp_path))


@pytest.mark.parametrize("value", [0, -1, "fast", float("nan"), None])
def test_rates_that_are_no_rates(value: Any, tmp_path: Path) -> None:
    machine = serving_machine("h100", "nccl", 8)
    content = report(machine)
    content["rows"][0]["decode_seconds"] = value
    with pytest.raises(ValueError, match=r"has decode_seconds .*: it must be a positive number"):
        calibrated(machine, written(content, tmp_path))
