"""The losses of `losses`, by liger-kernel's fused kernels: where Triton runs them, which is on GPUs."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from . import losses
from .losses import Sums, TokenLoss

_BETAS = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}  # of the generalised Jensen-Shannon divergence


def missing(device: torch.device) -> str | None:
    """Why they do not run on `device`, if they do not."""
    if find_spec("liger_kernel") is None:
        return "use_liger_kernel needs liger-kernel: pip install 'rewired[liger]', or leave it out."
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
    """`losses.token_loss`; liger-kernel takes chunks, too. Each of the two losses sums a gradient [V, H] of its own."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearJSD

    if not len(labels):  # it would divide by their number
        return losses.token_loss(loss, hidden_states, head, labels, teacher_states, teacher_head)
    if not head.requires_grad:  # a trained one gets its gradient in its own dtype
        head = losses.autocasted(head)
    learnt = (hidden_states, head) if loss.ce else (hidden_states.detach(), head.detach())
    ce = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)(learnt[1], learnt[0], labels)
    kd = torch.zeros_like(ce)
    if loss.kd and teacher_states is not None and teacher_head is not None:
        judge = LigerFusedLinearJSD(_BETAS[loss.divergence], temperature=loss.temperature, accum_dtype=torch.float32)
        mean = judge(hidden_states, head, teacher_states, losses.autocasted(teacher_head), labels)
        kd = loss.temperature**2 * len(labels) * mean
    return Sums(loss.ce * ce + loss.kd * kd, ce.detach(), kd.detach())
