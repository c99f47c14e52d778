"""Tests on a GPU. `--device cpu` takes every path of theirs that a CPU has."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where a test runs: "cuda", unless `--device` says otherwise. Skips where there is no GPU."""
    chosen: str = request.config.getoption("--device")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU; --device cpu takes the paths that a CPU has")
    return chosen
