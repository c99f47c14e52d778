"""What belongs to no family is refused with the reason, where it is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewired.checkpoint.checkpoint import Checkpoint

REASONS = {
    "qwen3_moe": "a mixture of experts",
    "qwen2_moe": "a mixture of experts",
    "mixtral": "a mixture of experts",
    "qwen2_5_vl": "it sees",
    "qwen3_vl": "it sees",
    "mistral3": "it sees",
    "pixtral": "it sees",
    "qwen3_next": "its attention is partly linear or recurrent",
    "qwen3_5": "its attention is partly linear or recurrent",
    "qwen3_5_text": "its attention is partly linear or recurrent",
    "gemma2": "it normalises what its modules write",
    "gemma3_text": "it normalises what its modules write",
    "olmo2": "it normalises what its modules write",
}


def refusal(model_type: str, folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}), encoding="utf-8")
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


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen2ForRewardModel",
        "Qwen2Model",
        "MistralForSequenceClassification",
        "MistralModel",
        "Qwen3ForTokenClassification",
    ],
)
def test_what_writes_no_text_is_refused(architecture: str, tmp_path: Path) -> None:
    """Reward models, classifiers, and models of embeddings, whose config.json names the model without its head."""
    model_type = architecture.partition("For")[0].removesuffix("Model").lower()
    sentence = refusal(model_type, tmp_path, architectures=[architecture])
    assert f'says architectures ["{architecture}"]' in sentence
    assert "not a model of rewards, classes or embeddings" in sentence
