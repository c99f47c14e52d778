"""Sizes of named models against what their cards say."""

from __future__ import annotations

import math

import pytest

from rewired.checkpoint.named_shapes import named_shapes

# billions of parameters, as the model cards give them
PARAMETERS = {
    "llama-3.1-8b": 8.03,
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "mistral-7b": 7.25,
    "mistral-nemo": 12.2,
    "mistral-small-24b": 23.6,
}


@pytest.mark.parametrize(("name", "billions"), PARAMETERS.items(), ids=PARAMETERS)
def test_a_named_shape_has_as_many_parameters_as_its_card_says(name: str, billions: float) -> None:
    found = sum(math.prod(shape) for shape in named_shapes()[name].tensors().values()) / 1e9
    assert found == pytest.approx(billions, rel=0.015)
