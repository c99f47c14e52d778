"""What a trace tells of two ranks that really ran, by the order of what they did."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from rewired.bench.trace import traced
from rewired.ranks import run_on_ranks
from tests.rewired.sharded import load, saved
from tests.rewired.tiny import tokens

LAYERS = 6
LADDER: list[dict[str, Any]] = [{"layers": "0-", "preset": "ladder"}]
LAUNCH, WAIT, GLOO = "c10d::allreduce_", "_c10d_functional::wait_tensor", "gloo:all_reduce"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::scaled_dot_product_attention")


def trace_forward(folder: Path) -> None:
    model = load(folder, 2)

    def run() -> None:
        model(tokens())

    run()
    traced(run, folder / f"{distributed.get_rank()}.json.gz")


def spans(events: list[dict[str, Any]], *names: str) -> list[tuple[float, float]]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] in names]


def hidden(events: list[dict[str, Any]]) -> int:
    """Behind how many all-reduces a matrix product ran: all on the thread of the model, so this is their order."""
    return sum(
        any(launched <= start and end <= waited for start, end in spans(events, *PRODUCTS))
        for (launched, _), (waited, _) in zip(spans(events, LAUNCH), spans(events, WAIT), strict=False)
    )  # the logits' wait comes last


@pytest.mark.parametrize(("wiring", "expected"), [([], 0), (LADDER, 2 * LAYERS - 1)], ids=["standard", "ladder"])
def test_matrix_products_run_behind_all_reduces_of_ladder_and_not_of_standard(
    wiring: list[dict[str, Any]], expected: int, tmp_path: Path
) -> None:
    run_on_ranks(trace_forward, 2, saved(wiring, tmp_path))
    for rank in range(2):
        with gzip.open(tmp_path / f"{rank}.json.gz", "rt") as stream:
            events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
        events.sort(key=lambda event: event["ts"])
        assert hidden(events) == expected
        modules = [event["name"] for event in events if event["name"].endswith(("Attention", "MLP"))]
        assert modules == ["RewiredLlamaAttention", "RewiredLlamaMLP"] * LAYERS
        launches, reductions = spans(events, LAUNCH), spans(events, GLOO)
        assert len(reductions) >= 2 * LAYERS
        # gloo works off a queue, in order: what it does first is what was launched first
        assert all(launch[0] <= own[0] for launch, own in zip(launches, reductions, strict=True))
