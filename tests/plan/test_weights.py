"""Weights of 8 and 4 bits: less memory and traffic, so a larger share of a step is communication."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rewired.checkpoint.named_shapes import find_shape
from rewired.checkpoint.shape import weight_bytes
from rewired.hardware import load as hardware
from rewired.plan.compute import Rank
from rewired.plan.engine import load
from rewired.plan.machine import serving_machine
from rewired.plan.ranking import PlanRequest, make_ranking
from rewired.plan.weights import BF16, WEIGHTS

SHAPE = find_shape("llama-3.1-70b")
ENGINE, SHEET = replace(load("serving"), flops_share=1.0, memory_share=1.0), hardware("l40s")


@pytest.mark.parametrize(("name", "traffic", "speed"), [("fp8", 1 / 2, 2), ("int8", 1 / 2, 2), ("int4", 1 / 4, 1)])
def test_products_read_fewer_bytes_and_some_compute_faster(name: str, traffic: float, speed: float) -> None:
    """A group of 128 weights of 4 bits has a scale of 16."""
    rank, numbers, scales = Rank(SHAPE, SHEET, ENGINE, 4), 1e9, 2 / 128 if name == "int4" else 0
    one_row, many = 1, 100_000
    expected = numbers * (2 * traffic + scales) / SHEET.memory_bandwidth
    assert rank.products(one_row, numbers, WEIGHTS[name]) == pytest.approx(expected)
    assert rank.products(many, numbers, WEIGHTS[name]) == pytest.approx(2 * many * numbers / SHEET.flops / speed)


def test_an_a100_reads_fp8_weights_and_computes_in_16_bits() -> None:
    a100, h100 = (serving_machine(name, "vllm", 4, "fp8").weights for name in ("a100", "h100"))
    assert (a100.bytes, a100.speed) == (1, 1)
    assert (h100.bytes, h100.speed) == (1, 2)


def test_layers_take_less_memory_and_embeddings_as_much() -> None:
    layers = SHAPE.num_hidden_layers * SHAPE.layer_weights / 4
    saved = weight_bytes(SHAPE, 4) - weight_bytes(SHAPE, 4, WEIGHTS["int8"].bytes)
    assert saved == pytest.approx(layers)


def test_a_wiring_wins_more_of_a_token_the_smaller_weights_are() -> None:
    def speedup(weights: str) -> float:
        request = PlanRequest("llama-3.1-70b", "l40s", gpus=4, weights=weights, goal="latency", batches=(1,))
        rows = make_ranking(replace(request, wirings=("ladder+peek",))).rows
        return next(row.speedup for row in rows if row.candidate.is_rewired)

    assert 1 < speedup(BF16.name) < speedup("int8") < speedup("int4")


def test_unknown_weights_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="There are no weights 'int3': choose one of bf16, fp8, int8, int4"):
        make_ranking(PlanRequest("llama-3.1-70b", weights="int3"))
