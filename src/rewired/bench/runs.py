"""What is timed of a model: a prefill, and a generation after it, in eager mode and as a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

PREFILL, DECODE, DECODE_COMPILED = "prefill", "decode", "decode_compiled"
MEASURES = (PREFILL, DECODE, DECODE_COMPILED)

Run = Callable[[], None]


class Caches:
    """The keys and values that all models of a cell share, since no time depends on their values."""

    def __init__(self, model: Any, tokens: torch.Tensor, new: int, is_compiled: bool) -> None:
        self.dynamic = DynamicCache(config=model.config)
        self.static: StaticCache | None = None
        model(tokens, past_key_values=self.dynamic, logits_to_keep=1)
        if is_compiled:
            self.static = StaticCache(config=model.config, max_cache_len=tokens.shape[1] + new)
            model(tokens, past_key_values=self.static, logits_to_keep=1)  # gives it its fixed addresses


def runs_of(model: Any, caches: Caches, tokens: torch.Tensor, new: int) -> dict[str, Run]:
    """Each measure as a function; whatever it does to the shared caches, it takes back."""
    runs = {PREFILL: _prefill(model, tokens), DECODE: _decode(model, caches.dynamic, tokens, new)}
    if caches.static is not None:
        runs[DECODE_COMPILED] = _compiled_decode(model, caches.static, tokens, new)
    return runs


def _prefill(model: Any, tokens: torch.Tensor) -> Run:
    def run() -> None:
        model(tokens, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

    return run


def _decode(model: Any, cache: DynamicCache, tokens: torch.Tensor, new: int) -> Run:
    def run() -> None:
        token = tokens[:, -1:]
        for _ in range(new):
            token = model(token, past_key_values=cache).logits.argmax(-1)
        cache.crop(-new)

    return run


def _compiled_decode(model: Any, cache: StaticCache, tokens: torch.Tensor, new: int) -> Run:
    """Compiled when it first runs; on a GPU, into a CUDA graph."""
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    step = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)
    token = tokens[:, -1:].clone()  # one address, as a graph wants it

    def run() -> None:
        for _ in range(new):
            torch.compiler.cudagraph_mark_step_begin()
            token.copy_(step(token, past_key_values=cache).logits.argmax(-1))
        for layer in cache.layers:
            layer.cumulative_length.sub_(new)  # type: ignore[union-attr]

    return run
