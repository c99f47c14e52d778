"""The collectives of the residual stream, each with what it does to gradients.

Inside the stream a rank holds a *part* of every gradient, and the ranks' parts add up to it. So forward and backward
reduce at the same place, the write, and views may differ per rank (CAAT-Net, section 4 and appendix B; Megatron's
place, before the norm's backward, is wrong then). Forward and backward mirror each other, and both overlap:

    launch          forward: start a reduction         backward: wait for the gradient
    land            forward: wait, add to the stream   backward: start the gradient's all-reduce
    sum_gradients   forward: nothing                   backward: all-reduce; for what is on all ranks and read in parts
    split_gradient  forward: nothing                   backward: divide by the ranks; for what leaves the stream

`group` is a process group's name, or None in one process, where none of them communicates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import reductions
from .reductions import Outcome, Reduction, add, finish, own


def launch(put_in: torch.Tensor, reduction: Reduction) -> Outcome:
    """Start to sum what this process puts in; `land` gives the total.

    While training, ranks send 16 bits where they compute in 16, forward and backward, and sum in float32: sums of
    16-bit gradients diverge (CAAT-Net, section 4). The gradient of a quantised sum is that of the plain one: straight
    through, and none for what rounding leaves.
    """
    if _trains(put_in) and (reduction.group or reduction.sections):
        return tuple(_Launch.apply(put_in, reduction))
    return _started(put_in, reduction)


def land(
    settled: torch.Tensor, total: torch.Tensor, group: str | None, after: torch.Tensor | None = None
) -> torch.Tensor:
    """`settled` plus what `launch` started: [B, T, H] plus [B, T, C], the first C of H channels.

    Code waits where it is written; a compiled graph, where `after` is there, behind which the all-reduce shall hide.
    """
    if group is None:
        return add(settled, total)
    return _Land.apply(settled, total, group) if _trains(total) else _landed(settled, total, after)


def came_with(settled: torch.Tensor, tensor: torch.Tensor, group: str | None) -> torch.Tensor:
    """`tensor`, which came with what `land` has added to `settled`."""
    return own(tensor, settled.detach()) if group and torch.compiler.is_compiling() else tensor


def land_and_launch(
    settled: torch.Tensor, total: torch.Tensor | None, put_in: torch.Tensor, reduction: Reduction, overlapped: bool
) -> tuple[torch.Tensor, Outcome]:
    """Land what is in flight, if anything, then launch; `overlapped` says that the next module hides it."""
    if torch.compiler.is_compiling() and overlapped and reduction.group and not _trains(put_in):
        # a compiled program must be kept from undoing the overlap
        settled, *outcome = reductions.land_and_launch(settled, total, put_in, reduction.as_numbers(), reduction.group)
        return settled, tuple(outcome)
    if total is not None:
        settled = land(settled, total, reduction.group, after=put_in)
    if overlapped or _trains(put_in) or torch.compiler.is_compiling():
        return settled, launch(put_in, reduction)
    return settled, reduction.sum(put_in)


def sum_gradients(group: str | None, *replicated: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors themselves; their gradients are summed over the ranks, in float32, all at once."""
    if group is None or not torch.is_grad_enabled():
        return replicated
    return _SumGradients.apply(group, *replicated)


def split_gradient(replicated: torch.Tensor, ranks: int) -> torch.Tensor:
    """`replicated` itself; each rank passes on its equal part of the gradient, which is the same on all."""
    return _SplitGradient.apply(replicated, ranks) if ranks > 1 and _trains(replicated) else replicated


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, put_in: torch.Tensor, reduction: Reduction) -> Outcome:
        ctx.dtype, ctx.shape = put_in.dtype, put_in.shape
        if reduction.group and reduction.sections:
            put_in = put_in.to(torch.promote_types(put_in.dtype, torch.float32))
        total, *left = _started(put_in, replace(reduction, adds_in_float32=True))
        if left:
            left[0] = left[0].to(ctx.dtype)  # the other is only there when the total is
            ctx.mark_non_differentiable(*left)
        return total, *left

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradient if torch.compiler.is_compiling() else finish(gradient)
        return whole.to(ctx.dtype).expand(ctx.shape), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settled: torch.Tensor, total: torch.Tensor, group: str) -> torch.Tensor:
        ctx.channels, ctx.group, ctx.dtype = total.shape[-1], group, total.dtype
        return _landed(settled, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (started,) = Reduction(ctx.group, adds_in_float32=True).start(gradient[..., : ctx.channels].to(ctx.dtype))
        # a graph adds up gradients without waiting for them, and several readers may land one update
        return gradient, finish(started) if torch.compiler.is_compiling() else started, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, *replicated: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in replicated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (started,) = Reduction(ctx.group, adds_in_float32=True).start(torch.cat([each.flatten() for each in gradients]))
        sums = finish(started).split([gradient.numel() for gradient in gradients])
        return None, *(total.view_as(own).to(own.dtype) for total, own in zip(sums, gradients, strict=True))


class _SplitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicated: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return replicated.view_as(replicated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / ctx.ranks, None


def _started(put_in: torch.Tensor, reduction: Reduction) -> Outcome:
    return reduction.defer(put_in) if reduction.group and _recomputes() else reduction.start(put_in)


def _recomputes() -> bool:
    """Whether this forward is gradient checkpointing's, in the midst of a backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _landed(settled: torch.Tensor, total: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return reductions.land(settled, total, after)
    return add(settled, finish(total))


def _trains(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad
