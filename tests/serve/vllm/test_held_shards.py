"""On fewer ranks than shards, each holds several: vLLM continues with the tokens that transformers continues with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from .models import PAYLOADS, WIRINGS, answers, greedy, regret, save

pytestmark = pytest.mark.timeout(1200)
SHARDS = 4
SIZES = {"num_key_value_heads": 4, "attention_bias": True}


@pytest.fixture(scope="module", params=[(1, True), (2, True), (1, False)], ids=["tp1", "tp2", "tp1-compiled"])
def setting(request: pytest.FixtureRequest) -> tuple[int, bool]:
    return request.param


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: save(folder / name, wiring, SHARDS, **SIZES) for name, wiring in (WIRINGS | PAYLOADS).items()}


@pytest.fixture(scope="module")
def generated(
    setting: tuple[int, bool], checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    ranks, eager = setting
    jobs = {name: {"model": str(model), "enforce_eager": eager} for name, model in checkpoints.items()}
    return answers(jobs, tmp_path_factory.mktemp("engine"), ranks)


@pytest.mark.parametrize("name", WIRINGS)
def test_the_same_tokens(name: str, generated: dict[str, Any], checkpoints: dict[str, Path]) -> None:
    assert generated[name] == greedy(checkpoints[name])


@pytest.mark.parametrize("name", PAYLOADS)
def test_with_payloads_the_same_tokens_but_for_ties(
    name: str, generated: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    assert regret(checkpoints[name], generated[name]) < 0.05
