"""The losses of `token_loss` computed by liger-kernel's fused Triton kernels, on GPUs."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from rewired import extras

from . import token_loss as chunked
from .token_loss import Sums, TokenLoss

_BETAS = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}  # of the generalised Jensen-Shannon divergence


def missing(device: torch.device) -> str | None:
    """The reason why the kernels do not run on `device`, None if they do."""
    if find_spec("liger_kernel") is None:
        return f"{extras.missing('liger', 'use_liger_kernel', 'liger-kernel')}, or leave it out."
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"use_liger_kernel needs a GPU, and this training runs on {device.type}: leave it out."
    return None


def token_loss(
    loss: TokenLoss,
    hidden_states: torch.Tensor,  # [N, H], after the final norm
    head: torch.Tensor,  # [V, H]
    labels: torch.Tensor,  # [N], the tokens to be predicted
    teacher_states: torch.Tensor | None = None,  # [N, H]; only for `kd`
    teacher_head: torch.Tensor | None = None,
) -> Sums:
    """The loss of `token_loss.token_loss`, in chunks, too. Each of its two parts sums a gradient [V, H] of its own."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearJSD

    if not len(labels):  # liger-kernel would divide by their number
        return chunked.token_loss(loss, hidden_states, head, labels, teacher_states, teacher_head)
    if not head.requires_grad:  # a trained one gets its gradient in its own dtype
        head = chunked.autocast(head)
    learnt = (hidden_states, head) if loss.ce else (hidden_states.detach(), head.detach())
    ce = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)(learnt[1], learnt[0], labels)
    kd = torch.zeros_like(ce)
    if loss.kd and teacher_states is not None and teacher_head is not None:
        jsd = LigerFusedLinearJSD(_BETAS[loss.divergence], temperature=loss.temperature, accum_dtype=torch.float32)
        mean = jsd(hidden_states, head, teacher_states, chunked.autocast(teacher_head), labels)
        kd = loss.temperature**2 * len(labels) * mean
    return Sums(loss.ce * ce + loss.kd * kd, ce.detach(), kd.detach())
