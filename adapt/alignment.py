"""Each rewired layer by itself: from what the original's layer is given, it learns to give what the original's gives.

What it is given is the original's stream as the student's wiring would leave it: for a ladder, with the last update
still in flight; where views differ per shard, with each shard's own parts. So no layer waits for another one to be
healed, and all learn in one pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear

from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.model.residual_stream import ResidualStream
from rewired.model.sharding import row_parallel
from rewired.model.wiring import ModuleWiring

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
    plain, watch = model.forward, _Watch(teacher, model.model.layers)

    def forward(self: Any, *args: Any, distils: bool = False, original: bool = False, **kwargs: Any) -> Any:
        if not distils and not original:
            return plain(*args, **kwargs)
        labels = kwargs.pop("labels", None)
        if original:
            outputs = teacher(None, **kwargs, use_cache=False)
            return linear(outputs.last_hidden_state, teacher.head.weight)  # type: ignore[arg-type]
        watch.run(**kwargs)
        mask = labels[:, 1:] != IGNORED
        errors = [
            apart(_given(layer, before, watch.arguments), after, mask)
            for index, (layer, (before, after)) in enumerate(zip(self.model.layers, watch.streams(), strict=True))
            if index in layers
        ]
        hidden = torch.stack(errors).mean()
        nothing = hidden.new_zeros(())
        return Losses(hidden, nothing, nothing, hidden.detach(), mask.sum())

    model.forward = MethodType(forward, model)


def _given(layer: Any, before: ResidualStream, arguments: Any) -> torch.Tensor:
    """All that is in the stream after `layer`, [B, T, H]."""
    output = layer(before, **arguments)
    return output.total(layer.shards) if isinstance(output, ResidualStream) else output


class _Watch:
    """A run of the teacher: what its last projections gave, where the student's are to give it whole, or were given,
    where each shard is to give its part; and what its layers were given beside the stream."""

    def __init__(self, teacher: Teacher, layers: Sequence[Any]) -> None:
        self.teacher, self.layers = teacher, layers  # the student's
        self.is_on = False  # the student runs on modules of the teacher's, too
        self.embedding: torch.Tensor | None = None
        self.arguments: dict[str, Any] = {}
        self.kept = deque[torch.Tensor]()  # of each last projection, [B, T, H] or [B, T, A]
        for layer, own in zip(teacher.model.layers, layers, strict=True):
            layer.register_forward_pre_hook(self._keep_arguments, with_kwargs=True)
            for projection, wiring in _projections(layer, own):
                if wiring.gives_partials:
                    projection.register_forward_pre_hook(self._keep_inputs)
                else:
                    projection.register_forward_hook(self._keep_outputs)

    def run(self, **inputs: Any) -> None:
        """Let the teacher run on the student's inputs."""
        self.kept.clear()
        self.embedding, self.is_on = None, True
        self.teacher(None, **inputs, use_cache=False)
        self.is_on = False

    def streams(self) -> Iterator[tuple[ResidualStream, torch.Tensor]]:
        """For each layer: the original's stream before it, wired as the student's, and all that is in it after it.

        What was kept is let go of on the way.
        """
        assert self.embedding is not None, "the teacher has run"
        stream, total = ResidualStream(self.embedding), self.embedding
        for layer, own in zip(self.teacher.model.layers, self.layers, strict=True):
            before = stream
            with torch.no_grad(), self.teacher.without_adapters():
                for projection, wiring in _projections(layer, own):
                    update = parts = self.kept.popleft()
                    if wiring.gives_partials:
                        update, parts = projection(update), row_parallel(projection, own.shards, update)
                    stream = stream.after_read(wiring, own.shards).write(parts, wiring, own.shards)
                    total = total + update
            yield before, total

    def _keep_arguments(self, layer: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        if self.is_on and self.embedding is None:
            self.embedding, self.arguments = args[0].detach(), kwargs

    def _keep_inputs(self, projection: Any, args: tuple[torch.Tensor, ...]) -> None:
        if self.is_on:
            self.kept.append(args[0].detach())

    def _keep_outputs(self, projection: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if self.is_on:
            self.kept.append(output.detach())


def _projections(layer: Any, own: Any) -> list[tuple[Any, ModuleWiring]]:
    """The last one of each module of `layer`, and how the student's, `own`, is wired there."""
    return [(layer.self_attn.o_proj, own.attn_wiring), (layer.mlp.down_proj, own.mlp_wiring)]
