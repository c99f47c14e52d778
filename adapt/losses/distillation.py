"""Distillation: a student whose forward computes its losses against a teacher, so that DDP and FSDP cover both."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from rewired.model.residual_stream import ResidualStream
from rewired.model.rewired_model import RewiredForCausalLM

from ..data.tokens import IGNORED
from ..model.lora import whole
from ..model.teacher import Teacher
from .token_loss import TokenLoss, relative_error, token_loss


class Losses(NamedTuple):
    """Sums over the tokens that are learnt; only `total` has a gradient.

    A tuple, so that DDP and FSDP find its tensors.
    """

    total: torch.Tensor
    ce: torch.Tensor
    kd: torch.Tensor
    hidden: torch.Tensor
    tokens: torch.Tensor


def add_losses(
    model: RewiredForCausalLM, teacher: Teacher, loss: TokenLoss, hidden_weight: float, layers: Sequence[int]
) -> None:
    """Patch `model.forward`: `model(..., labels=..., distils=True)` gives `Losses`, and `model(..., original=True)` the
    original's logits.

    `hidden_weight` is the weight of the squared error of the stream after each of `layers`, relative to the original's
    square; after the last layer, both are taken after the last norm.
    """
    plain, trunk = model.forward, _Trunk(model, teacher.first)

    def forward(self: Any, *args: Any, distils: bool = False, original: bool = False, **kwargs: Any) -> Any:
        if not distils and not original:
            return plain(*args, **kwargs)
        labels = kwargs.pop("labels", None)
        kwargs |= {"use_cache": False, "output_hidden_states": distils and hidden_weight > 0}
        student = self.base(**kwargs)
        target = teacher(trunk.take(), **kwargs)
        if original:
            return linear(target.last_hidden_state, whole(teacher.head.weight))
        labels = labels[:, 1:]
        mask = labels != IGNORED
        states, teacher_states = (outputs.last_hidden_state[:, :-1][mask] for outputs in (student, target))  # [N, H]
        teacher_part = (teacher_states, whole(teacher.head.weight)) if loss.kd else ()
        sums = token_loss(loss, states, whole(self.get_output_embeddings().weight), labels[mask], *teacher_part)
        hidden = sums.ce.new_zeros(())
        if hidden_weight:
            first = max(teacher.first, 0)
            pairs = [(student.hidden_states[n + 1], target.hidden_states[n + 1 - first]) for n in layers]
            hidden = torch.stack([relative_error(*pair, mask) for pair in pairs]).mean()
        return Losses(sums.total + hidden_weight * hidden, sums.ce, sums.kd, hidden, mask.sum())

    model.forward = MethodType(forward, model)


class _Trunk:
    """The slot that hands the stream before the student's layer `first`, [B, T, H], to the teacher.

    A hook fills it in the student's forward. It stays empty for a teacher that reads the tokens itself.
    """

    def __init__(self, model: RewiredForCausalLM, first: int) -> None:
        self.states: torch.Tensor | None = None
        if first >= 0:
            layers: Sequence[nn.Module] = [*model.base.decoder_layers, model.base.last_norm]
            layers[first].register_forward_pre_hook(self._fill)

    def take(self) -> torch.Tensor | None:
        states, self.states = self.states, None
        return states

    @torch.no_grad()
    def _fill(self, layer: Any, arguments: tuple[torch.Tensor | ResidualStream, ...]) -> None:
        stream = arguments[0]
        self.states = stream.total(layer.shards) if isinstance(stream, ResidualStream) else stream.detach()
