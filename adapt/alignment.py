"""Each rewired layer by itself: from what the original's layer is given, it learns to give what the original's gives.

What it is given is the original's stream as the student's wiring would leave it: for a ladder, with the last update
still in flight; where views differ per shard, with each shard's own parts. So no layer waits for another one to be
healed, and all learn in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear

from rewired.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.residual_stream import ResidualStream
from rewired.sharding import row_parallel

from .distillation import Losses
from .losses import apart
from .teacher import Teacher
from .tokens import IGNORED


def add_alignment(model: RewiredLlamaForCausalLM, teacher: Teacher, layers: Sequence[int]) -> None:
    """Let `model(..., labels=..., distils=True)` give its `Losses`, of which only `hidden` is not zero: the squared
    error after each of `layers`, relative to the original's square; and `model(..., original=True)` the original's
    logits.

    `teacher` has all layers.
    """
    plain, watch = model.forward, _Watch(teacher)

    def forward(self: Any, *args: Any, distils: bool = False, original: bool = False, **kwargs: Any) -> Any:
        if not distils and not original:
            return plain(*args, **kwargs)
        labels = kwargs.pop("labels", None)
        if original:
            outputs = teacher(None, **kwargs, use_cache=False)
            return linear(outputs.last_hidden_state, teacher.head.weight)  # type: ignore[arg-type]
        watch.run(**kwargs)
        mask = labels[:, 1:] != IGNORED
        with torch.no_grad(), teacher.without_adapters():
            streams = watch.streams(self.model.layers)
        pairs = ((self.model.layers[index], *streams[index]) for index in layers)
        errors = [apart(_given(layer, before, watch.arguments), after, mask) for layer, before, after in pairs]
        watch.forget()
        hidden = torch.stack(errors).mean()
        nothing = hidden.new_zeros(())
        return Losses(hidden, nothing, nothing, hidden.detach(), mask.sum())

    model.forward = MethodType(forward, model)


def _given(layer: Any, before: ResidualStream, arguments: Any) -> torch.Tensor:
    """All that is in the stream after `layer`, [B, T, H]."""
    output = layer(before, **arguments)
    return output.total(layer.shards) if isinstance(output, ResidualStream) else output


class _Watch:
    """A run of the teacher: what its last projections were given, and what its layers were given beside the stream."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher, self.is_on = teacher, False  # the student runs on modules of the teacher's, too
        self.embedding: torch.Tensor | None = None
        self.arguments: dict[str, Any] = {}
        self.given: list[tuple[Any, torch.Tensor]] = []  # each last projection, and its input [B, T, A]
        for layer in teacher.model.layers:
            layer.register_forward_pre_hook(self._keep_arguments, with_kwargs=True)
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.register_forward_pre_hook(self._keep_given)

    def run(self, **inputs: Any) -> None:
        """Let the teacher run on the student's inputs."""
        self.forget()
        self.is_on = True
        self.teacher(None, **inputs, use_cache=False)
        self.is_on = False

    def streams(self, layers: Sequence[Any]) -> list[tuple[ResidualStream, torch.Tensor]]:
        """For each layer: the original's stream before it, wired as the student's, and all that is in it after it."""
        assert self.embedding is not None, "the teacher has run"
        stream, total, found = ResidualStream(self.embedding), self.embedding, []
        given = iter(self.given)
        for layer in layers:
            before = stream
            for wiring in (layer.attn_wiring, layer.mlp_wiring):
                projection, inputs = next(given)
                own = projection(inputs)
                parts = row_parallel(projection, layer.shards, inputs) if wiring.gives_partials else own
                stream = stream.after_read(wiring, layer.shards).write(parts, wiring, layer.shards)
                total = total + own
            found.append((before, total))
        return found

    def forget(self) -> None:
        self.embedding, self.arguments, self.given = None, {}, []

    def _keep_arguments(self, layer: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        if self.is_on and self.embedding is None:
            self.embedding, self.arguments = args[0].detach(), kwargs

    def _keep_given(self, projection: Any, args: tuple[torch.Tensor, ...]) -> None:
        if self.is_on:
            self.given.append((projection, args[0].detach()))
