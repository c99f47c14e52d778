"""Continuous batching, timed by its own clock."""

from __future__ import annotations

import time

import torch

from rewired.bench.request import BenchRequest
from rewired.bench.runs import Batches
from tests.rewired.tiny import rewired_model


@torch.no_grad()
def test_a_run_measures_the_first_token_and_the_others() -> None:
    model = rewired_model([{"layers": "0-2", "preset": "ladder"}], 4, num_hidden_layers=2).eval()
    request = BenchRequest("tiny", ("ladder",), prompt=8, new=5, engine="transformers-cb")
    (run,) = Batches(model, torch.ones(3, 8, dtype=torch.long), request).runs(model)
    start = time.perf_counter()
    measured = run()
    assert set(measured) == {"prefill", "decode"}
    assert min(measured.values()) > 0
    assert measured["prefill"] + 4 * measured["decode"] < time.perf_counter() - start
