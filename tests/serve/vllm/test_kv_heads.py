"""A model of two KV heads on four ranks: converted for these, it continues as the original and as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from rewired.convert import Request, convert

from .models import WIRINGS, answers, greedy, save

pytestmark = pytest.mark.timeout(1200)
RANKS = 4
CHOSEN = ("standard", "ladder-peek", "desync-2x", "partial")


def test_the_same_tokens(tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", [], tp_shards=2)
    wirings: dict[str, list[dict[str, Any]]] = {
        name: WIRINGS[name] or [{"layers": "0-", "preset": "standard"}] for name in CHOSEN
    }
    made = {
        name: convert(dense, tmp_path / name, Request(wiring, tp_shards=RANKS)).out for name, wiring in wirings.items()
    }
    found = answers({name: {"model": str(model)} for name, model in made.items()}, tmp_path / "engine", RANKS)
    assert found == {name: greedy(model) for name, model in made.items()}
    assert found["standard"] == greedy(dense)
