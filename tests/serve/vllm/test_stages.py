"""Two pipeline stages: where nothing is local or in flight between them; else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from .models import WIRINGS, answers, greedy, save

LADDER_ABOVE = [{"layers": "2-4", "preset": "ladder"}]
LADDER_BELOW = [{"layers": "0-2", "preset": "ladder"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    wirings = {"ladder below": LADDER_BELOW, "ladder above": LADDER_ABOVE, "parallel": WIRINGS["parallel"]}
    return {name: save(folder / name, wiring, tp_shards=1) for name, wiring in wirings.items()}


@pytest.fixture(scope="module")
def found(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # compiled: in eager mode, on a CPU, vLLM 0.32 skips the pass that makes the second stage's buffers
    stages = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": False}
    jobs = {name: {"model": str(model)} | stages for name, model in models.items()}
    return answers(jobs, tmp_path_factory.mktemp("engine"), ranks=1)


@pytest.mark.parametrize("name", ["ladder below", "parallel"])
def test_the_same_tokens_where_nothing_is_in_flight_between_them(
    name: str, models: dict[str, Path], found: dict[str, Any]
) -> None:
    assert found[name] == greedy(models[name])


def test_refused_where_something_is(found: dict[str, Any]) -> None:
    assert "would begin with layer 2, where layer 1 has left something local or in flight" in found["ladder above"]
