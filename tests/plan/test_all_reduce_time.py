"""All-reduce times: through the measured points, and by the formulas elsewhere."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewired import hardware
from rewired.plan.all_reduce_time import AllReduce, Curve, Network, Ring, curves_of, halves_of, measured_curves

SIZES = st.floats(1, 1e10)


def test_interpolation_passes_through_every_measured_point() -> None:
    text = (files("rewired.plan") / "collectives.csv").read_text()
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    reduces = [row for row in rows if row["collective"] == "all_reduce"]
    assert len(rows) > 1800 and len(reduces) > 1100
    for row in reduces:
        curve = measured_curves(row["hardware"], row["library"])[int(row["gpus"])]
        assert curve.at(float(row["bytes"])) == pytest.approx(float(row["microseconds"]) * 1e-6, rel=1e-12)


def test_figures_of_the_issue() -> None:
    """One token of a 70B at TP 8 on H100, and a prefill of 2,048 tokens on four L40S."""
    token, prefill = 8192 * 2, 2048 * 8192 * 2
    microseconds = {lib: measured_curves("h100_sxm", lib)[8].at(token) * 1e6 for lib in ("nccl", "vllm", "trtllm")}
    assert microseconds == pytest.approx({"nccl": 19, "vllm": 5.3, "trtllm": 3.6}, rel=0.02)
    assert measured_curves("l40s", "trtllm")[4].at(prefill) == pytest.approx(10e-3, rel=0.02)


@given(SIZES, SIZES)
def test_between_two_points_times_stay_between(one: float, other: float) -> None:
    curve = Curve((1e3, 1e5), (2e-6, 5e-6))
    assert 2e-6 <= curve.at(min(one, 1e5)) <= 5e-6 * (1 + 1e-12)
    assert curve.at(min(one, other)) <= curve.at(max(one, other)) * (1 + 1e-12)


def test_between_two_points_it_is_a_line_in_logarithms() -> None:
    assert Curve((1e2, 1e4), (1e-6, 1e-4)).at(1e3) == pytest.approx(1e-5)
    assert Curve((1e2, 1e4), (1e-6, 1e-4)).at(10) == 1e-6  # latency alone
    assert Curve((1e2, 1e4), (1e-6, 1e-4)).at(2e4) == pytest.approx(2e-4)  # bandwidth alone


@given(SIZES, st.integers(2, 64))
def test_ring(size: float, gpus: int) -> None:
    by_hand = 3e-6 + sum(1e-6 + size / gpus / 1e11 for _ in range(2 * (gpus - 1)))
    assert Ring(3e-6, 1e-6, 1e11).at(size, gpus) == pytest.approx(by_hand)
    assert Ring(3e-6, 1e-6, 2e11).at(size, gpus) <= Ring(3e-6, 1e-6, 1e11).at(size, gpus)


@given(st.floats(1, 1e10), st.integers(2, 4), st.floats(0.1, 1e4))
def test_network_is_the_best_pipelined_tree(size: float, nodes: int, chunks: float) -> None:
    """The first of k chunks goes through all stages, the others follow one stage apart."""
    gpus, stages = 8 * nodes, 2 * math.ceil(math.log2(nodes))
    bandwidth = 2 * (gpus - 1) / gpus * size / 4e11

    def pipelined(chunks: float) -> float:
        return (stages + chunks) * (7e-6 + bandwidth / chunks)

    seconds = Network(7e-6, 4e11).at(size, nodes, gpus)
    assert seconds <= pipelined(chunks) * (1 + 1e-9)
    assert seconds == pytest.approx(pipelined(math.sqrt(bandwidth * stages / 7e-6)))


def test_quantised_parts_are_scattered_and_gathered_as_nccl_was_measured() -> None:
    """On L40S halves of an all-reduce; where they were not measured, an all-reduce and what a second one waits for."""
    sheet, size = hardware.load("l40s"), 16e6
    scatter, gather = (measured_curves("l40s", "nccl", name)[4] for name in ("reduce_scatter", "all_gather"))
    ring = AllReduce({}, Ring(1e-6, 0, 1e11), Network(7e-6, 4e11), sheet.gpus_per_node, slack=2e-6)
    measured = replace(ring, curves=curves_of(sheet, "nccl"), halves=halves_of(sheet))
    assert measured.quantised_seconds(size, 4) == pytest.approx(scatter.at(size) + gather.at(size) + 4e-6)
    assert measured.quantised_seconds(size, 4) == pytest.approx(measured.seconds(size, 4), rel=0.25)
    assert ring.quantised_seconds(size, 4) == pytest.approx(ring.seconds(size, 4) + 2e-6)
    assert ring.quantised_seconds(size, 1) == 0


def test_one_gpu_reduces_nothing_and_two_nodes_take_longer() -> None:
    sheet = hardware.load("h100")
    reduce = AllReduce(curves_of(sheet, "nccl"), Ring(0, 0, 1e11), Network(7e-6, 4e11), sheet.gpus_per_node)
    assert reduce.seconds(1e6, 1) == 0
    assert reduce.seconds(1e6, 16) > reduce.seconds(1e6, 8) > 0
    alone = replace(reduce, gpus_per_node=1, halves=halves_of(sheet))  # one GPU a node: the network and nothing else
    assert alone.seconds(1e6, 4) == pytest.approx(Network(7e-6, 4e11).at(1e6, 4, 4))
    assert alone.quantised_seconds(1e6, 4) == pytest.approx(alone.seconds(1e6, 4))


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="No all-reduce of trtllm was measured on A100 SXM: choose --library vllm or"):
        curves_of(hardware.load("a100"), "trtllm")
    with pytest.raises(ValueError, match="There is no library 'gloo'"):
        curves_of(hardware.load("a100"), "gloo")
    with pytest.raises(ValueError, match="There is no hardware 'h1000': choose one of a100, b200"):
        hardware.load("h1000")


@pytest.mark.parametrize("name", hardware.names())
def test_data_sheets_are_whole(name: str) -> None:
    sheet = hardware.load(name)
    assert 1e14 < sheet.flops < 1e16 and 5e11 < sheet.memory_bandwidth < 1e13 and 4e10 < sheet.memory < 3e11
    assert sheet.link_bandwidth >= sheet.network_bandwidth > 0
    text = (files("rewired") / "hardware" / f"{name}.toml").read_text()
    assert "Source:" in text.splitlines()[0]
