"""Quantised checkpoints in vLLM, by its own kernels: what transformers continues with, or as good within rounding."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.lifecycle import forward

pytest.importorskip("vllm")

from rewired.checkpoint.rewired_config import write_code
from rewired.model.family import LLAMA
from tests.quantised_models import quantise

from .models import WIRINGS, answers, greedy, regret, save

pytestmark = pytest.mark.timeout(1200)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.04,  # of larger logits, bfloat16 and int8 drop more than the tolerance
}
DTYPES = {"W8A8": torch.float32, "W4A16": torch.bfloat16}  # of activations, as vLLM's kernels for a CPU take them
CASES = [(scheme, wiring) for scheme in DTYPES for wiring in WIRINGS]
TOLERANCE = 0.05  # in logits, of which a token may be worse than the best


@pytest.fixture(scope="module")
def checkpoints(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for scheme, wiring in CASES:
        whole = save(folder / "whole", WIRINGS[wiring], ranks, **SIZES, dtype=DTYPES[scheme])
        made[scheme, wiring] = quantise(whole, folder / f"{scheme}-{wiring}", scheme)
        write_code(LLAMA, made[scheme, wiring])
        shutil.rmtree(whole)
    return made


@pytest.fixture(scope="module")
def generated(
    enforce_eager: bool,
    ranks: int,
    checkpoints: dict[tuple[str, str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Any, Any]:
    options = {"enforce_eager": enforce_eager}
    jobs: dict[Any, dict[str, Any]] = {
        (scheme, wiring): {"model": str(model), "dtype": str(DTYPES[scheme]).removeprefix("torch."), **options}
        for (scheme, wiring), model in checkpoints.items()
    }
    return answers(jobs, tmp_path_factory.mktemp("engine"), ranks)


@pytest.fixture(autouse=True)
def _scaled_as_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors scales the largest activation of a token to 127.5, and vLLM's kernel to 127."""

    def scales(value: Any, args: Any, module: Any, global_scale: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        assert (args.num_bits, args.strategy, args.symmetric) == (8, "token", True)
        scale = value.abs().amax(-1, keepdim=True) / 127
        return scale, torch.zeros_like(scale, dtype=torch.int8)

    monkeypatch.setattr(forward, "compute_dynamic_scales_and_zp", scales)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_same_tokens_or_as_good_ones(
    case: tuple[str, str], generated: dict[Any, Any], checkpoints: dict[tuple[str, str], Path]
) -> None:
    assert generated[case] == greedy(checkpoints[case]) or regret(checkpoints[case], generated[case]) < TOLERANCE
