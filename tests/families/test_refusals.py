"""What belongs to no family, or writes no text, is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewired.checkpoint.checkpoint import Checkpoint


def refusal(model_type: str, folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        Checkpoint.open(folder)
    return str(error.value)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_5_vl", "qwen3_next", "gemma"])
def test_other_families_are_refused(model_type: str, tmp_path: Path) -> None:
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
