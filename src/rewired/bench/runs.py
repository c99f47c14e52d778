"""What is timed of a model in transformers: a prefill, and decoding after it, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from .request import BenchRequest
from .timing import Run, timed

PREFILL, DECODE, DECODE_COMPILED = "prefill", "decode", "decode_compiled"
MEASURES = (PREFILL, DECODE, DECODE_COMPILED)


class Steps:
    """Runs of models on one prompt, [B, T]. They share their caches, since no time depends on what is in them."""

    def __init__(self, first: Any, tokens: torch.Tensor, request: BenchRequest) -> None:
        self.tokens, self.new = tokens, request.new
        self.dynamic = DynamicCache(config=first.config)
        self.static: StaticCache | None = None
        first(tokens, past_key_values=self.dynamic, logits_to_keep=1)
        self.dynamic.activate_past_recording()  # or a full sliding window can take nothing back
        if request.is_compiled:
            self.static = StaticCache(config=first.config, max_cache_len=tokens.shape[1] + self.new)
            first(tokens, past_key_values=self.static, logits_to_keep=1)  # gives it its fixed addresses

    def runs(self, model: Any) -> Iterator[Run]:
        """Each measures one thing; whatever it does to the shared caches, it takes back."""
        yield lambda: {PREFILL: timed(self._prefill(model))}
        yield lambda: {DECODE: timed(self._decode(model, self.dynamic)) / self.new}
        if self.static is not None:
            decode = self._compiled_decode(model, self.static)
            yield lambda: {DECODE_COMPILED: timed(decode) / self.new}

    def _prefill(self, model: Any) -> Callable[[], None]:
        def run() -> None:
            model(self.tokens, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

        return run

    def _decode(self, model: Any, cache: DynamicCache) -> Callable[[], None]:
        def run() -> None:
            token = self.tokens[:, -1:]
            for _ in range(self.new):
                token = model(token, past_key_values=cache).logits.argmax(-1)
            cache.crop(-self.new)

        return run

    def _compiled_decode(self, model: Any, cache: StaticCache) -> Callable[[], None]:
        """Compiled when it first runs; on a GPU, into a CUDA graph.

        A layer with a window counts tokens in a Python number too, which must be no part of the code.
        """
        mode = "reduce-overhead" if model.device.type == "cuda" else "default"
        windows: list[Any] = [layer for layer in cache.layers if hasattr(layer, "cumulative_length_int")]
        step = torch.compile(model, mode=mode, fullgraph=True, dynamic=None if windows else False)
        prompt = self.tokens.shape[1]
        token = self.tokens[:, -1:].clone()  # one address, as a graph wants it

        def run() -> None:
            for _ in range(self.new):
                torch.compiler.cudagraph_mark_step_begin()
                token.copy_(step(token, past_key_values=cache).logits.argmax(-1))
            for layer in cache.layers:
                layer.cumulative_length.fill_(prompt)  # type: ignore[union-attr]
            for layer in windows:
                layer.cumulative_length_int = prompt

        return run
