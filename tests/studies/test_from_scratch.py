"""The masks of the study of trainings from scratch: what they send, and that nothing else changes a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rewired.model.modeling_rewired_llama import RewiredLlamaConfig, RewiredLlamaForCausalLM
from tests.test_docs import ROOT


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "studies"))
    import from_scratch

    yield from_scratch
    sys.path.remove(str(ROOT / "studies"))


def test_masks_send_the_share_that_they_say(study: Any) -> None:
    parts = torch.randn(4, 2, 32, 64)
    largest = study.top_k(0.25, parts)
    assert (largest.sum(-1) == 16).all()
    assert (parts.abs() * largest).amax(-1).equal(parts.abs().amax(-1))
    assert study.at_random(0.25, parts).mean().item() == pytest.approx(0.25, abs=0.02)


def test_a_mask_is_the_same_in_the_backward_pass(study: Any) -> None:
    """And one that sends all changes nothing: the shards' parts are those of the model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model = RewiredLlamaForCausalLM(RewiredLlamaConfig(**sizes, num_hidden_layers=2, tp_shards=4))
    ids = torch.randint(64, (2, 9))
    expected = model(ids).logits
    torch.testing.assert_close(study.masked(model, partial(study.top_k, 1.0))(ids).logits, expected)
    study.masked(model, lambda parts: torch.zeros_like(parts))(ids, labels=ids).loss.backward()
    writers = [p for name, p in model.named_parameters() if "o_proj" in name or "down_proj" in name]
    assert all(not weight.grad.any() for weight in writers)
