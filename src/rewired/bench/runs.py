"""What is timed of a model in transformers: a prefill and decoding after it, eager and compiled, or a training step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, StaticCache

from rewired.model.sharding import on_this_rank

from .request import BenchRequest
from .timing import Run, timed

PREFILL, PREFILL_COMPILED = "prefill", "prefill_compiled"
DECODE, DECODE_COMPILED = "decode", "decode_compiled"
TRAINING = "training_step"
MEASURES = (PREFILL, PREFILL_COMPILED, DECODE, DECODE_COMPILED, TRAINING)


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
            prefill, decode = self._compiled(model, self.static)
            yield lambda: {PREFILL_COMPILED: timed(prefill)}
            yield lambda: {DECODE_COMPILED: timed(decode) / self.new}

    def passes(self, model: Any) -> dict[str, Callable[[], object]]:
        """What sends what each measure counts: a prompt, and one more token."""
        return {
            PREFILL: partial(model, self.tokens, logits_to_keep=1),
            DECODE: partial(model, self.tokens[:, :1]),
        }

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

    def _compiled(self, model: Any, cache: StaticCache) -> tuple[Callable[[], None], Callable[[], None]]:
        """A prefill and decoding, compiled when they first run; on a GPU, into CUDA graphs.

        A layer with a window counts tokens in a Python number too, which must be no part of the code.
        """
        mode = "reduce-overhead" if model.device.type == "cuda" else "default"
        windows: list[Any] = [layer for layer in cache.layers if hasattr(layer, "cumulative_length_int")]
        step = torch.compile(model, mode=mode, fullgraph=True, dynamic=None if windows else False)
        prompt = self.tokens.shape[1]
        token = self.tokens[:, -1:].clone()  # one address, as a graph wants it

        def holds(tokens: int) -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(tokens)  # type: ignore[union-attr]
            for layer in windows:
                layer.cumulative_length_int = tokens

        def prefill() -> None:
            holds(0)
            torch.compiler.cudagraph_mark_step_begin()
            step(self.tokens, past_key_values=cache, logits_to_keep=1)

        def decode() -> None:
            for _ in range(self.new):
                torch.compiler.cudagraph_mark_step_begin()
                token.copy_(step(token, past_key_values=cache).logits.argmax(-1))
            holds(prompt)

        return prefill, decode


class TrainingSteps:
    """Training steps of models on one batch, [B, T]: forward, backward, and AdamW. Gradients and the optimizer's state
    are shared, and what it updates are copies: the weights stay what they are."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.copies: dict[str, torch.Tensor] = {}
        self.state: Any = defaultdict(dict)  # of the optimizer, by copy

    def runs(self, model: Any) -> Iterator[Run]:
        step = self.step(model)
        yield lambda: {TRAINING: timed(step)}

    def passes(self, model: Any) -> dict[str, Callable[[], object]]:
        step = self.step(model)
        step()  # in the first, FSDP2 gathers more
        return {TRAINING: step}

    def step(self, model: Any) -> Callable[[], None]:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an earlier forward leaves some whole
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            self.copies.setdefault(name, on_this_rank(parameter).detach().clone())
        optimizer = torch.optim.AdamW([self.copies[name] for name in parameters], fused=True)
        optimizer.state = self.state

        def run() -> None:
            with torch.enable_grad():
                model(self.tokens, labels=self.tokens, use_cache=False).loss.backward()
            for name, parameter in parameters.items():
                self.copies[name].grad, parameter.grad = _gradient(parameter), None
            optimizer.step()
            optimizer.zero_grad()

        return run


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Of what this rank holds of a parameter, as an optimizer takes it; an embedding's may come whole."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements).to_local()
    assert gradient is not None, "every weight takes part"
    return gradient
