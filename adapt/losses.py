"""Cross-entropy and the divergence from a teacher, over chunks of tokens: logits of all tokens never exist at once.

For V = 128k, float32 logits of 8 k tokens would be 4 GB, of two models and their gradients four times that. Each
chunk's gradient is taken while its logits are there, as fused losses do; nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, log_softmax

from .recipe.choices import DIVERGENCES

_CHUNK_BYTES = 1 << 28  # of one float32 tensor of logits

# of log-probabilities [n, V] of teacher and student: itself [n], and its gradient by the student's logits [n, V]
Divergence = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def forward_kl(teacher: torch.Tensor, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(teacher || student): the student covers all that the teacher does."""
    wanted = teacher.exp()
    return (wanted * (teacher - student)).sum(-1), student.exp().sub_(wanted)


def reverse_kl(teacher: torch.Tensor, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(student || teacher): the student keeps to what the teacher finds likely."""
    own, apart = student.exp(), student - teacher
    divergence = (own * apart).sum(-1)
    return divergence, own.mul_(apart.sub_(divergence[:, None]))


def jsd(teacher: torch.Tensor, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The Jensen-Shannon divergence: the mean of both KLs to the mean of both distributions."""
    mean = torch.logaddexp(teacher, student).sub_(math.log(2))
    of_student, gradient = reverse_kl(mean, student)  # the mean's own part of the gradient is nothing
    return ((teacher.exp() * (teacher - mean)).sum(-1) + of_student) / 2, gradient.div_(2)


_DIVERGENCES: dict[str, Divergence] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}
assert tuple(_DIVERGENCES) == DIVERGENCES, "a recipe may choose any of them"


@dataclass(frozen=True)
class TokenLoss:
    """`ce` times the cross-entropy with the labels, and `kd` times a divergence from the teacher.

    With a temperature t both models' logits are divided by t in the divergence, which is multiplied by t squared, so
    that its gradient keeps its size (Hinton et al., arXiv 1503.02531, section 2).
    """

    ce: float = 1.0
    kd: float = 0.0
    divergence: str = "forward_kl"
    temperature: float = 1.0


@dataclass(frozen=True)
class Sums:
    """Over the tokens; only `total` has a gradient."""

    total: torch.Tensor
    ce: torch.Tensor
    kd: torch.Tensor


def token_loss(
    loss: TokenLoss,
    hidden_states: torch.Tensor,  # [N, H], after the final norm
    head: torch.Tensor,  # [V, H]
    labels: torch.Tensor,  # [N], the tokens to be predicted
    teacher_states: torch.Tensor | None = None,  # [N, H]; only for `kd`
    teacher_head: torch.Tensor | None = None,
) -> Sums:
    """The loss summed over all N tokens, and its parts."""
    return Sums(*_Chunked.apply(hidden_states, head, labels, teacher_states, teacher_head, loss))


class _Chunked(torch.autograd.Function):
    """Forward: sums over chunks of tokens, and their gradients. Backward: those gradients, scaled."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        teacher_states: torch.Tensor | None,
        teacher_head: torch.Tensor | None,
        loss: TokenLoss,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        needs_states, needs_head = ctx.needs_input_grad[:2]
        ctx.head_dtype = head.dtype
        states_grad = torch.zeros_like(hidden_states) if needs_states else None
        # a sum over many chunks, which 16 bits would swallow
        head_grad = torch.zeros_like(head, dtype=torch.float32) if needs_head else None
        sums = torch.zeros(3, dtype=torch.float32, device=hidden_states.device)
        size = max(_CHUNK_BYTES // (4 * head.shape[0]), 1)
        # autocast would keep a copy of the head for each chunk
        hidden_states, head, teacher_states, teacher_head = map(
            autocasted, (hidden_states, head, teacher_states, teacher_head)
        )
        for start in range(0, len(labels), size):
            rows = slice(start, start + size)
            wanted = None
            if teacher_states is not None and teacher_head is not None:
                wanted = linear(teacher_states[rows], teacher_head).float()
            gradient, parts = _of_chunk(loss, linear(hidden_states[rows], head).float(), labels[rows], wanted)
            sums += parts
            gradient = gradient.to(head.dtype)
            if states_grad is not None:
                states_grad[rows] = gradient @ head
            if head_grad is not None:
                head_grad += gradient.T @ hidden_states[rows]
        ctx.save_for_backward(states_grad, None if head_grad is None else head_grad.to(ctx.head_dtype))
        total, ce, kd = sums.unbind()
        ctx.mark_non_differentiable(ce, kd)
        return total, ce, kd

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states_grad, head_grad = ctx.saved_tensors
        scaled = [None if own is None else own * grads[0].to(own.dtype) for own in (states_grad, head_grad)]
        return (*scaled, None, None, None, None)


def autocasted(tensor: torch.Tensor | None) -> Any:
    """To what autocast computes in, where it is on."""
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _of_chunk(
    loss: TokenLoss, logits: torch.Tensor, labels: torch.Tensor, wanted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a chunk's float32 logits [n, V]: the loss's gradient by them, and total, cross-entropy and divergence."""
    log_probs, labels = log_softmax(logits, -1), labels[:, None]
    ce = -log_probs.gather(1, labels).sum()
    kd, gradient = ce.new_zeros(()), torch.zeros_like(logits)
    if loss.ce:
        gradient.add_(log_probs.exp(), alpha=loss.ce)
        gradient.scatter_add_(1, labels, gradient.new_full(labels.shape, -loss.ce))
    if loss.kd and wanted is not None:
        t = loss.temperature
        student = log_probs if t == 1 else log_softmax(logits / t, -1)
        divergences, slope = _DIVERGENCES[loss.divergence](log_softmax(wanted if t == 1 else wanted / t, -1), student)
        kd = t * t * divergences.sum()
        gradient.add_(slope, alpha=loss.kd * t)
    return gradient, torch.stack([loss.ce * ce + loss.kd * kd, ce, kd])


def apart(own: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of |own - wanted|^2 / |wanted|^2 over the tokens whose next one counts.

    `own` and `wanted` are streams, [B, T, H], and `mask` [B, T - 1].
    """
    own, wanted = (states[:, :-1][mask].float() for states in (own, wanted))
    return ((own - wanted).square().sum(-1) / wanted.square().sum(-1)).sum()
