"""Decoding as one CUDA graph, with a static cache, gives eager mode's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

from tests.rewired.tiny import WIRINGS, rewired_model, tokens

pytestmark = pytest.mark.gpu
STEPS = 12


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
@torch.no_grad()
def test_compiled_decoding_gives_the_tokens_of_eager_mode(wiring: list[dict[str, Any]], device: str) -> None:
    """In float32, where no two of these tokens are near a tie."""
    torch.compiler.reset()
    counters.clear()
    model, prompt = rewired_model(wiring).to(device), tokens().to(device)
    expected = decode(model, model, prompt, DynamicCache(config=model.config))

    options: dict[str, Any] = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager"}
    step = torch.compile(model, fullgraph=True, dynamic=False, **options)
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + STEPS)
    assert decode(model, step, prompt, cache) == expected
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


def decode(model: Any, step: Any, prompt: torch.Tensor, cache: Any) -> list[list[int]]:
    """Greedy tokens after the prompt, which `model` reads in eager mode."""
    token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)  # [B, 1]; the address stays the same
    found = [token.clone()]
    for _ in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        token.copy_(step(token, past_key_values=cache).logits[:, -1:].argmax(-1))
        found.append(token.clone())
    return torch.cat(found, dim=1).tolist()
