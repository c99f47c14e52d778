"""Each family continues with transformers' tokens: four wirings, eager and compiled, on 1 and 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from rewired.checkpoint.rewired_config import write_code
from rewired.families import FAMILIES, classes

from .models import SIZES, WIRINGS, answers, greedy

pytestmark = pytest.mark.timeout(1200)
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 64},
}
CHOSEN = ("standard", "ladder-peek", "desync-2x", "mixed")
CASES = [(family, wiring) for family in CONFIGS for wiring in CHOSEN]


def save(folder: Path, model_type: str, wiring: str, tp_shards: int) -> Path:
    """A checkpoint with random norm weights, biases and gains."""
    family, tokens = FAMILIES[model_type], {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = classes(family, "Config")(
        **SIZES, **tokens, **CONFIGS[model_type], wiring=WIRINGS[wiring], tp_shards=tp_shards
    )
    torch.manual_seed(0)
    model = classes(family, "ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "gain" in name:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    write_code(family, folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {case: save(folder / "-".join(case), *case, tp_shards=ranks) for case in CASES}


@pytest.fixture(scope="module")
def generated(
    enforce_eager: bool,
    ranks: int,
    checkpoints: dict[tuple[str, str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Any, Any]:
    jobs: dict[Any, dict[str, Any]] = {
        case: {"model": str(model), "enforce_eager": enforce_eager} for case, model in checkpoints.items()
    }
    return answers(jobs, tmp_path_factory.mktemp("engine"), ranks)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_same_tokens(
    case: tuple[str, str], generated: dict[Any, Any], checkpoints: dict[tuple[str, str], Path]
) -> None:
    assert generated[case] == greedy(checkpoints[case])
