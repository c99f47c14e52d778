"""`standard` in bfloat16 is stock Llama, but for rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.rewired.test_standard import SHAPES
from tests.rewired.tiny import rewired_model, stock_twin, tokens

pytestmark = pytest.mark.gpu
ROUNDING = 1e-2  # of the whole


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_and_gradients_are_stock_llamas(shape: dict[str, Any], device: str) -> None:
    model = rewired_model([], **shape).to(device, torch.bfloat16)
    stock, prompt = stock_twin(model).to(device), tokens().to(device)
    ours, theirs = model(prompt, labels=prompt), stock(prompt, labels=prompt)
    assert_close(ours.logits, theirs.logits, "logits")
    ours.loss.backward()
    theirs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in stock.named_parameters():
        assert_close(gradients[name], parameter.grad, name)


@torch.no_grad()
def test_decoding_is_stock_llamas(device: str) -> None:
    model = rewired_model([]).to(device, torch.bfloat16)
    caches = [(each, DynamicCache(config=each.config)) for each in (model, stock_twin(model).to(device))]
    for part in tokens(2, 12).to(device).split([9, 1, 1, 1], dim=1):
        ours, theirs = (each(part, past_key_values=cache).logits for each, cache in caches)
        assert_close(ours, theirs, "logits")


def assert_close(found: Any, expected: Any, name: str) -> None:
    assert found.dtype == expected.dtype == torch.bfloat16
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error <= ROUNDING, f"{name}: relative error {error:.1e}"
