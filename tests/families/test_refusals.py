"""What belongs to no family is refused with the reason, where it is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewired.checkpoint.checkpoint import Checkpoint

REASONS = {
    "qwen3_moe": "a mixture of experts",
    "qwen2_5_vl": "it sees",
    "qwen3_next": "its attention is partly linear or recurrent",
    "gemma3_text": "it normalises what its modules write",
    "olmo2": "it normalises what its modules write",
}


def refusal(model_type: str, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        Checkpoint.open(folder)
    return str(error.value)


@pytest.mark.parametrize("model_type", REASONS)
def test_the_reason_is_in_the_sentence(model_type: str, tmp_path: Path) -> None:
    assert f"model_type '{model_type}' ({REASONS[model_type]}" in refusal(model_type, tmp_path)


@pytest.mark.parametrize("model_type", ["gemma", "olmo", "phi3"])
def test_no_reason_is_made_up(model_type: str, tmp_path: Path) -> None:
    """Gemma 1 and OLMo 1 do not normalise what their modules write."""
    assert f"model_type '{model_type}'." in refusal(model_type, tmp_path)
