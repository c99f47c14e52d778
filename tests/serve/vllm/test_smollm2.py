"""A real model, right after its conversion: vLLM's tokens are transformers', compiled, on one rank and on three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from transformers import AutoTokenizer

from rewired.convert import Request, convert

from .engine import run
from .models import NEW_TOKENS, greedy

TEXTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a village by the sea, there lived a"]
WIRINGS: dict[int, list[dict[str, Any]]] = {
    1: [{"layers": "20-30", "preset": "ladder"}],
    3: [{"layers": "15-20", "preset": "ladder", "peek": True}, {"layers": "20-30", "preset": "desync"}],
}


@pytest.mark.parametrize("ranks", WIRINGS)
def test_the_same_tokens(ranks: int, smollm2: Path, tmp_path: Path) -> None:
    hybrid = convert(smollm2, tmp_path / "hybrid", Request(WIRINGS[ranks])).out
    prompts = [AutoTokenizer.from_pretrained(hybrid)(text).input_ids for text in TEXTS]
    job = {"model": str(hybrid), "prompts": prompts, "new_tokens": NEW_TOKENS}
    assert run([job], tmp_path / "engine", ranks) == [greedy(hybrid, prompts)]
