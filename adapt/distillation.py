"""A student's forward that gives its losses against a teacher, inside of forward, where DDP and FSDP prepare it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.model.residual_stream import ResidualStream

from . import losses
from .losses import Sums, TokenLoss, apart
from .teacher import Teacher
from .tokens import IGNORED


class Losses(NamedTuple):
    """Sums over the tokens that count; only `total` has a gradient. A tuple, so that DDP and FSDP see its tensors."""

    total: torch.Tensor
    ce: torch.Tensor
    kd: torch.Tensor
    hidden: torch.Tensor
    tokens: torch.Tensor


def add_losses(
    model: RewiredLlamaForCausalLM,
    teacher: Teacher,
    loss: TokenLoss,
    hidden_weight: float,
    layers: Sequence[int],
    token_loss: Callable[..., Sums] = losses.token_loss,
) -> None:
    """Let `model(..., labels=..., distils=True)` give `Losses`, and `model(..., original=True)` the original's logits.

    `hidden_weight` is that of the squared error between both streams after each of `layers`, relative to the original's
    square; after the model's last layer both are what the last norm makes of them. `token_loss` computes `loss`.
    """
    plain, trunk = model.forward, _Trunk(model, teacher.first)

    def forward(self: Any, *args: Any, distils: bool = False, original: bool = False, **kwargs: Any) -> Any:
        if not distils and not original:
            return plain(*args, **kwargs)
        labels = kwargs.pop("labels", None)
        kwargs |= {"use_cache": False, "output_hidden_states": distils and hidden_weight > 0}
        student = self.model(**kwargs)
        wanted = teacher(trunk.take(), **kwargs)
        if original:
            return linear(wanted.last_hidden_state, _whole(teacher.head))
        labels = labels[:, 1:]
        mask = labels != IGNORED
        states, targets = (outputs.last_hidden_state[:, :-1][mask] for outputs in (student, wanted))  # [N, H]
        judge = (targets, _whole(teacher.head)) if loss.kd else ()
        sums = token_loss(loss, states, _whole(self.lm_head), labels[mask], *judge)
        hidden = sums.ce.new_zeros(())
        if hidden_weight:
            first = max(teacher.first, 0)
            after = [(student.hidden_states[n + 1], wanted.hidden_states[n + 1 - first]) for n in layers]
            hidden = torch.stack([apart(*pair, mask) for pair in after]).mean()
        return Losses(sums.total + hidden_weight * hidden, sums.ce, sums.kd, hidden, mask.sum())

    model.forward = MethodType(forward, model)


class _Trunk:
    """What the student's layer `first` was given, [B, T, H]; nothing for a teacher that reads the tokens itself."""

    def __init__(self, model: RewiredLlamaForCausalLM, first: int) -> None:
        self.states: torch.Tensor | None = None
        if first >= 0:
            layers: Sequence[nn.Module] = [*model.model.layers, model.model.norm]
            layers[first].register_forward_pre_hook(self._keep)

    def take(self) -> torch.Tensor | None:
        states, self.states = self.states, None
        return states

    @torch.no_grad()
    def _keep(self, layer: Any, arguments: tuple[torch.Tensor | ResidualStream, ...]) -> None:
        stream = arguments[0]
        self.states = stream.total(layer.shards) if isinstance(stream, ResidualStream) else stream.detach()


def _whole(head: nn.Module) -> torch.Tensor:
    weight = head.weight
    return weight.full_tensor() if isinstance(weight, DTensor) else weight  # type: ignore[return-value]
