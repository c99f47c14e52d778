"""A real model: how much conversion hurts it, in the design's order, and that three ranks compute what one does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rewired  # noqa: F401 - registers the classes
from rewired.convert import Request, convert
from rewired.ranks import run_on_ranks

from ..conftest import PROSE
from .sharded import load
from .test_against_reference import assert_close

# Perplexity over the original's, on our prose. In brackets what the design measured on another text.
RATIOS: dict[str, tuple[dict[str, Any], float]] = {
    "desync-2x [1.60]": ({"layers": "15-30", "preset": "desync"}, 1.663),
    "desync-4x [2.05]": ({"layers": "15-30", "preset": "desync", "every": 4}, 2.086),
    "ladder + peek [2.14]": ({"layers": "15-30", "preset": "ladder", "peek": True}, 2.245),
    "ladder [3.50]": ({"layers": "15-30", "preset": "ladder"}, 3.217),
    "ladder + peek, 10-30 [4.81]": ({"layers": "10-30", "preset": "ladder", "peek": True}, 3.645),
    "desync-2x by mean [7.65]": ({"layers": "15-30", "preset": "desync", "merge": "mean"}, 4.711),
}


def perplexity(path: Path) -> float:
    """On the first 4 x 512 tokens of our prose."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prose = AutoTokenizer.from_pretrained(path)(PROSE.read_text(), return_tensors="pt").input_ids[:, :2048]
    with torch.no_grad():
        losses = [model(window, labels=window).loss.item() for window in prose.view(4, 1, 512)]
    return math.exp(sum(losses) / 4)


@pytest.mark.slow
def test_perplexity_right_after_conversion(smollm2: Path, tmp_path: Path) -> None:
    original = perplexity(smollm2)
    ratios = {}
    for name, (region, _) in RATIOS.items():
        ratios[name] = perplexity(convert(smollm2, tmp_path / name, Request([region])).out) / original
    assert ratios == pytest.approx({name: ratio for name, (_, ratio) in RATIOS.items()}, rel=0.02)
    assert list(ratios.values()) == sorted(ratios.values()), "the order of the gaps is the design's"


@pytest.mark.slow
def test_conversion_of_no_layer_keeps_the_perplexity(smollm2: Path, tmp_path: Path) -> None:
    out = convert(smollm2, tmp_path / "dense", Request([{"layers": "0-", "preset": "ladder", "overlap": False}])).out
    assert perplexity(out) == perplexity(smollm2)


# on three ranks; wirings that one process is measured with above, and the other kinds
ON_RANKS: dict[str, list[dict[str, Any]]] = {
    "standard": [{"layers": "0-", "preset": "standard"}],
    "parallel": [{"layers": "15-30", "preset": "parallel"}],
    "ladder": [{"layers": "15-30", "preset": "ladder"}],
    "ladder + peek": [{"layers": "15-30", "preset": "ladder", "peek": True}],
    "desync-2x": [{"layers": "15-30", "preset": "desync"}],
    "desync-4x by mean": [{"layers": "15-30", "preset": "desync", "every": 4, "merge": "mean"}],
    "partial": [{"layers": "15-30", "preset": "partial", "shared_fraction": 0.75}],
    "mixed": [
        {"layers": "10-16", "preset": "ladder"},
        {"layers": "16-22:attn", "preset": "desync"},
        {"layers": "22-30", "preset": "parallel", "overlap": True, "peek": True},
    ],
}


@pytest.mark.slow  # `generate`'s tests have one of them, and its tokens
@pytest.mark.parametrize("name", ON_RANKS)
def test_three_ranks_give_the_outputs_of_one_process(name: str, smollm2: Path, tmp_path: Path) -> None:
    folder = convert(smollm2, tmp_path / "hybrid", Request(ON_RANKS[name])).out
    expected_logits, expected_tokens = answers_to_prose(folder, 1)
    for logits, generated in run_on_ranks(answers_to_prose, 3, folder, 3):
        assert_close(torch.from_numpy(logits), torch.from_numpy(expected_logits), "logits")
        assert generated == expected_tokens


def answers_to_prose(folder: Path, ranks: int) -> tuple[Any, list[int]]:
    """Logits of 24 tokens, and 64 greedy tokens after them."""
    model = load(folder, ranks, dtype=torch.float32)
    prose = AutoTokenizer.from_pretrained(folder)(PROSE.read_text(), return_tensors="pt").input_ids[:, :24]
    with torch.no_grad():
        logits = model(prose).logits
    return logits.numpy(), model.generate(prose, max_new_tokens=64, min_new_tokens=64, do_sample=False)[0].tolist()
