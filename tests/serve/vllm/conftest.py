"""What most tests of vLLM run in: on one rank and two, eager and compiled."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def enforce_eager(request: pytest.FixtureRequest) -> bool:
    """As vLLM's option of that name."""
    return bool(request.param)
