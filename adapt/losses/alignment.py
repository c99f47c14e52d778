"""Layerwise alignment: each rewired layer learns by itself to give the output of the original's layer.

Its input is the original's stream as the student's wiring would leave it: for a ladder, with the last update still in
flight; where views differ per shard, with each shard's own parts. So no layer has to wait until another one is healed,
and all learn in one pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear

from rewired.model.residual_stream import ResidualStream
from rewired.model.rewired_model import RewiredForCausalLM
from rewired.model.sharding import row_parallel
from rewired.model.wiring import ModuleWiring

from ..data.tokens import IGNORED
from ..model.teacher import Teacher
from .distillation import Losses
from .token_loss import relative_error


def add_alignment(model: RewiredForCausalLM, teacher: Teacher, layers: Sequence[int]) -> None:
    """Patch `model.forward`: `model(..., labels=..., distils=True)` gives `Losses`, and `model(..., original=True)` the
    original's logits.

    The loss is the squared error after each of `layers`, relative to the original's square: `hidden`; `ce` and `kd` are
    zero. `teacher` has all layers.
    """
    plain, recorder = model.forward, _Recorder(teacher, model.base.decoder_layers)

    def forward(self: Any, *args: Any, distils: bool = False, original: bool = False, **kwargs: Any) -> Any:
        if not distils and not original:
            return plain(*args, **kwargs)
        labels = kwargs.pop("labels", None)
        if original:
            outputs = teacher(None, **kwargs, use_cache=False)
            return linear(outputs.last_hidden_state, teacher.head.weight)  # type: ignore[arg-type]
        recorder.run(**kwargs)
        mask = labels[:, 1:] != IGNORED
        errors = [
            relative_error(_output(layer, before, recorder.arguments), after, mask)
            for index, (layer, (before, after)) in enumerate(zip(recorder.layers, recorder.streams(), strict=True))
            if index in layers
        ]
        hidden = torch.stack(errors).mean()
        zero = hidden.new_zeros(())
        return Losses(hidden, zero, zero, hidden.detach(), mask.sum())

    model.forward = MethodType(forward, model)


def _output(layer: Any, before: ResidualStream, arguments: Any) -> torch.Tensor:
    """The whole stream after `layer`, [B, T, H], all updates merged."""
    output = layer(before, **arguments)
    return output.total(layer.shards) if isinstance(output, ResidualStream) else output


class _Recorder:
    """Hooks that record a run of the teacher: the embedding, the layers' arguments beside the stream, and of each
    module's last projection the output, or, where the student's shards each give a part, the input."""

    def __init__(self, teacher: Teacher, layers: Sequence[Any]) -> None:
        self.teacher, self.layers = teacher, layers  # the student's
        self.is_on = False  # the teacher shares modules with the student, whose runs are not recorded
        self.embedding: torch.Tensor | None = None
        self.arguments: dict[str, Any] = {}
        self.recorded = deque[torch.Tensor]()  # of each last projection, [B, T, H] or [B, T, A]
        for layer, student_layer in zip(teacher.layers, layers, strict=True):
            layer.register_forward_pre_hook(self._record_arguments, with_kwargs=True)
            for projection, wiring in _projections(layer, student_layer):
                if wiring.gives_partials:
                    projection.register_forward_pre_hook(self._record_input)
                else:
                    projection.register_forward_hook(self._record_output)

    def run(self, **inputs: Any) -> None:
        """Run the teacher on the student's inputs, and record it."""
        self.recorded.clear()
        self.embedding, self.is_on = None, True
        self.teacher(None, **inputs, use_cache=False)
        self.is_on = False

    def streams(self) -> Iterator[tuple[ResidualStream, torch.Tensor]]:
        """For each layer: the original's stream before it, wired as the student's, and the whole stream after it.

        Frees what was recorded on the way.
        """
        assert self.embedding is not None, "the teacher has run"
        stream, total = ResidualStream(self.embedding), self.embedding
        for layer, student_layer in zip(self.teacher.layers, self.layers, strict=True):
            before, shards = stream, student_layer.shards
            with torch.no_grad(), self.teacher.as_original():
                for projection, wiring in _projections(layer, student_layer):
                    update = parts = self.recorded.popleft()
                    if wiring.gives_partials:
                        update, parts = projection(update), row_parallel(projection, shards, update)
                    stream = stream.after_read(wiring, shards).write(parts, wiring, shards)
                    total = total + update
            yield before, total

    def _record_arguments(self, layer: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        if self.is_on and self.embedding is None:
            self.embedding, self.arguments = args[0].detach(), kwargs

    def _record_input(self, projection: Any, args: tuple[torch.Tensor, ...]) -> None:
        if self.is_on:
            self.recorded.append(args[0].detach())

    def _record_output(self, projection: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if self.is_on:
            self.recorded.append(output.detach())


def _projections(layer: Any, student_layer: Any) -> list[tuple[Any, ModuleWiring]]:
    """The last projection of each module of the teacher's `layer`, and the wiring of the student's module."""
    modules = zip(student_layer.family.modules, student_layer.wirings, strict=True)
    return [(layer.get_submodule(f"{module.path}.{module.writer.name}"), wiring) for module, wiring in modules]
