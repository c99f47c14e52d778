"""Cross-entropy and the divergence from a teacher, in chunks of tokens: the logits of all tokens never exist at once.

For V = 128k, the float32 logits of 8k tokens would take 4 GB, and those of two models with their gradients four times
as much. Each chunk's gradient is computed while its logits exist, as in fused losses; nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, log_softmax

_CHUNK_BYTES = 1 << 28  # of one float32 tensor of logits

# (teacher's, student's log-probabilities, both [n, V]) -> (divergence [n], its gradient by the student's logits [n, V])
Divergence = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def forward_kl(teacher: torch.Tensor, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(teacher || student): the student covers all that the teacher does."""
    teacher_probs = teacher.exp()
    return (teacher_probs * (teacher - student)).sum(-1), student.exp().sub_(teacher_probs)


def reverse_kl(teacher: torch.Tensor, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(student || teacher): the student keeps to what the teacher finds likely."""
    student_probs, log_ratio = student.exp(), student - teacher
    divergence = (student_probs * log_ratio).sum(-1)
    return divergence, student_probs.mul_(log_ratio.sub_(divergence[:, None]))


def jsd(teacher: torch.Tensor, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The Jensen-Shannon divergence: the mean of both KLs to the mean of both distributions."""
    mean = torch.logaddexp(teacher, student).sub_(math.log(2))
    student_kl, gradient = reverse_kl(mean, student)  # the gradient through the mean is zero
    teacher_kl = (teacher.exp() * (teacher - mean)).sum(-1)
    return (teacher_kl + student_kl) / 2, gradient.div_(2)


_DIVERGENCES: dict[str, Divergence] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}


@dataclass(frozen=True)
class TokenLoss:
    """`ce` times the cross-entropy with the labels plus `kd` times a divergence from the teacher.

    In the divergence, both models' logits are divided by the temperature t, and the result is multiplied by t squared,
    so that its gradient keeps its size (Hinton et al., arXiv 1503.02531, section 2).
    """

    ce: float = 1.0
    kd: float = 0.0
    divergence: str = "forward_kl"
    temperature: float = 1.0


@dataclass(frozen=True)
class Sums:
    """Losses summed over the tokens; only `total` has a gradient."""

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
    """Forward: the sums over all chunks, and their gradients. Backward: those gradients, scaled."""

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
            autocast, (hidden_states, head, teacher_states, teacher_head)
        )
        for start in range(0, len(labels), size):
            rows = slice(start, start + size)
            teacher_logits = None
            if teacher_states is not None and teacher_head is not None:
                teacher_logits = linear(teacher_states[rows], teacher_head).float()
            logits = linear(hidden_states[rows], head).float()
            gradient, chunk_sums = _chunk_loss(loss, logits, labels[rows], teacher_logits)
            sums += chunk_sums
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
        scaled = [None if grad is None else grad * grads[0].to(grad.dtype) for grad in (states_grad, head_grad)]
        return (*scaled, None, None, None, None)


def autocast(tensor: torch.Tensor | None) -> Any:
    """`tensor` in the dtype that autocast computes in, if it is on."""
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _chunk_loss(
    loss: TokenLoss, logits: torch.Tensor, labels: torch.Tensor, teacher_logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a chunk, from float32 logits [n, V].

    Returns its gradient by the logits [n, V], and the sums of total, cross-entropy and divergence [3].
    """
    log_probs, labels = log_softmax(logits, -1), labels[:, None]
    ce = -log_probs.gather(1, labels).sum()
    kd, gradient = ce.new_zeros(()), torch.zeros_like(logits)
    if loss.ce:
        gradient.add_(log_probs.exp(), alpha=loss.ce)
        gradient.scatter_add_(1, labels, gradient.new_full(labels.shape, -loss.ce))
    if loss.kd and teacher_logits is not None:
        t = loss.temperature
        student = log_probs if t == 1 else log_softmax(logits / t, -1)
        teacher = log_softmax(teacher_logits if t == 1 else teacher_logits / t, -1)
        divergences, slope = _DIVERGENCES[loss.divergence](teacher, student)
        kd = t * t * divergences.sum()
        gradient.add_(slope, alpha=loss.kd * t)
    return gradient, torch.stack([loss.ce * ce + loss.kd * kd, ce, kd])


def relative_error(states: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of |states - target|^2 / |target|^2 over the tokens that are learnt.

    `states` and `target` are streams, [B, T, H]; `mask` [B, T - 1] says of which tokens the next one is learnt.
    """
    states, target = (stream[:, :-1][mask].float() for stream in (states, target))
    return ((states - target).square().sum(-1) / target.square().sum(-1)).sum()
