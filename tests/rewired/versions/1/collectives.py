"""The collectives of the residual stream, each with what it does to gradients.

Inside the stream a rank holds a *part* of every gradient, and the ranks' parts add up to it. So forward and backward
reduce at the same place, the write, and views may differ per rank (CAAT-Net, section 4 and appendix B; Megatron's
place, before the norm's backward, is wrong then). Forward and backward mirror each other, and both overlap:

    launch          forward: start the all-reduce      backward: wait for the gradient
    land            forward: wait, add to the stream   backward: start the gradient's all-reduce
    sum_gradients   forward: nothing                   backward: all-reduce; for what is on all ranks and read in parts
    split_gradient  forward: nothing                   backward: divide by the ranks; for what leaves the stream

`group` is a process group's name, or None in one process, where none of them communicates. What a compiler sees is in
`graph_collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .graph_collectives import add, start_all_reduce
from .graph_collectives import after as after_in_graph
from .graph_collectives import all_reduce as all_reduce_in_graph
from .graph_collectives import land as land_in_graph
from .graph_collectives import land_and_launch as land_and_launch_in_graph
from .graph_collectives import land_and_launch_quantised as land_and_launch_quantised_in_graph
from .graph_collectives import quantised_sum as quantised_sum_in_graph
from .graph_collectives import start_quantised_sum as start_quantised_sum_in_graph
from .payload import Sections
from .quantisation import Reduction, quantised_sum
from .quantised_reduction import RankReduction, start_quantised_sum


def launch(output: torch.Tensor, group: str | None) -> torch.Tensor:
    """Start to sum `output` over the ranks; `land` gives the sum.

    While training it sums in float32, which also is the dtype of the gradient that comes back: sums of 16-bit
    gradients diverge (CAAT-Net, section 4).
    """
    if group is None:
        return output
    return _Launch.apply(output, group) if _trains(output) else _start_or_defer(output, group)


def launch_quantised(parts: torch.Tensor, sections: Sections, group: str | None) -> Reduction:
    """Start to sum the held shards' parts, [r, B, T, C], which are sent quantised, as their sum is; `land` gives it.

    The gradient is that of the plain sum: straight through, and none for what rounding leaves.
    """
    if group is None and _trains(parts):
        return Reduction(*_QuantisedSum.apply(parts, sections))
    if group is None:
        return _quantised_sum(parts, sections)
    if _trains(parts):
        return Reduction(*_LaunchQuantised.apply(parts, sections, group))
    return _start_quantised_or_defer(parts, sections, group)


def land(
    settled: torch.Tensor, in_flight: torch.Tensor, group: str | None, after: torch.Tensor | None = None
) -> torch.Tensor:
    """`settled` plus what `launch` started: [B, T, H] plus [B, T, C], the first C of H channels.

    Code waits where it is written; a compiled graph, where `after` is there, behind which the all-reduce shall hide.
    """
    if group is None:
        return add(settled, in_flight)
    if _trains(in_flight):
        return _Land.apply(settled, in_flight, group)
    if torch.compiler.is_compiling():
        return land_in_graph(settled, in_flight, after)
    return add(settled, finish(in_flight))


def landed(tensor: torch.Tensor, settled: torch.Tensor, group: str | None) -> torch.Tensor:
    """`tensor`, which came with what `land` has added to `settled`."""
    if group is None or not torch.compiler.is_compiling():
        return tensor
    return after_in_graph(tensor, settled.detach())


def land_and_launch(
    settled: torch.Tensor, in_flight: torch.Tensor | None, output: torch.Tensor, group: str | None, overlapped: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Land what is in flight, if anything, then launch `output`; `overlapped` says that the next module hides it."""
    if _hides_in_graph(output, group, overlapped):
        return land_and_launch_in_graph(settled, in_flight, output, group)
    if in_flight is not None:
        settled = land(settled, in_flight, group, after=output)
    return settled, launch(output, group)


def land_and_launch_quantised(
    settled: torch.Tensor,
    in_flight: torch.Tensor | None,
    parts: torch.Tensor,
    group: str | None,
    overlapped: bool,
    sections: Sections,
) -> tuple[torch.Tensor, Reduction]:
    """The same with `launch_quantised`."""
    if _hides_in_graph(parts, group, overlapped):
        settled, *reduction = land_and_launch_quantised_in_graph(settled, in_flight, parts, _flat(sections), group)
        return settled, Reduction(*reduction)
    if in_flight is not None:
        settled = land(settled, in_flight, group, after=parts)
    return settled, launch_quantised(parts, sections, group)


def sum_gradients(group: str | None, *replicated: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors themselves; their gradients are summed over the ranks, in float32, in one all-reduce."""
    if group is None or not torch.is_grad_enabled():
        return replicated
    return _SumGradients.apply(group, *replicated)


def split_gradient(replicated: torch.Tensor, ranks: int) -> torch.Tensor:
    """`replicated` itself; each rank passes on its equal part of the gradient, which is the same on all."""
    return _SplitGradient.apply(replicated, ranks) if ranks > 1 and _trains(replicated) else replicated


def start(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """An all-reduce under way. Outside a graph, a tensor that waits when it is used, whoever uses it."""
    started = start_all_reduce(tensor, group)
    return started if torch.compiler.is_compiling() else AsyncCollectiveTensor(started)


def start_quantised(parts: torch.Tensor, sections: Sections, group: str) -> Reduction:
    """The same of quantised parts; what rounding leaves of the sum is there when `total` was waited for."""
    if torch.compiler.is_compiling():
        return Reduction(*start_quantised_sum_in_graph(parts, _flat(sections), group))
    started = start_quantised_sum(parts, sections, group)
    return started._replace(total=AsyncCollectiveTensor(started.total))


def finish(in_flight: torch.Tensor) -> torch.Tensor:
    """What `start` started, complete."""
    if isinstance(in_flight, AsyncCollectiveTensor):
        return in_flight.trigger_wait()
    return torch.ops._c10d_functional.wait_tensor(in_flight)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, group: str) -> torch.Tensor:
        ctx.dtype = output.dtype
        return _start_or_defer(_widened(output), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return finish(gradient).to(ctx.dtype), None


class _LaunchQuantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, sections: Sections, group: str) -> tuple[torch.Tensor, ...]:
        ctx.dtype, ctx.held = parts.dtype, len(parts)
        total, left, left_of_sum = _start_quantised_or_defer(_widened(parts), sections, group)
        left = left.to(parts.dtype)
        ctx.mark_non_differentiable(left, left_of_sum)
        return total, left, left_of_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        own = finish(gradient).to(ctx.dtype)
        return own.expand(ctx.held, *own.shape), None, None


class _QuantisedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, sections: Sections) -> tuple[torch.Tensor, ...]:
        ctx.shards = len(parts)
        total, left, left_of_sum = _quantised_sum(parts, sections)
        ctx.mark_non_differentiable(left, left_of_sum)
        return total, left, left_of_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.expand(ctx.shards, *gradient.shape), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settled: torch.Tensor, in_flight: torch.Tensor, group: str) -> torch.Tensor:
        ctx.channels, ctx.group = in_flight.shape[-1], group
        return add(settled, finish(in_flight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        own = _widened(gradient[..., : ctx.channels])
        # a graph adds up gradients without waiting for them, and several readers may land one update
        return gradient, _reduce(own, ctx.group) if torch.compiler.is_compiling() else start(own, ctx.group), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, *replicated: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in replicated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = torch.cat([_widened(gradient).flatten() for gradient in gradients])
        sums = _reduce(flat, ctx.group).split([gradient.numel() for gradient in gradients])
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


class WhenRead(AsyncCollectiveTensor):
    """A tensor like another that is computed when it is read.

    For reductions: recomputation stops early, and throws most of the last away. One that was started and never waited
    for would be kept, with its tensor, until the process ends.
    """

    run: Callable[[], torch.Tensor]

    def __new__(cls, like: torch.Tensor, run: Callable[[], torch.Tensor]) -> WhenRead:
        deferred = super().__new__(cls, like)
        deferred.run = run
        return deferred

    def trigger_wait(self) -> torch.Tensor:
        if not self.completed:
            self.elem = self.run()
            self.completed = True
        return self.elem


def _start_or_defer(output: torch.Tensor, group: str) -> torch.Tensor:
    return WhenRead(output, lambda: finish(start(output, group))) if _recomputes() else start(output, group)


def _start_quantised_or_defer(parts: torch.Tensor, sections: Sections, group: str) -> Reduction:
    if not _recomputes():
        return start_quantised(parts, sections, group)
    reduction = RankReduction(parts, sections, group)
    return reduction.outcome._replace(total=WhenRead(reduction.total, reduction.run))


def _quantised_sum(parts: torch.Tensor, sections: Sections) -> Reduction:
    if torch.compiler.is_compiling():
        return Reduction(*quantised_sum_in_graph(parts, _flat(sections)))
    return quantised_sum(parts, sections)


def _reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return all_reduce_in_graph(tensor, group)
    return finish(start(tensor, group))


def _flat(sections: Sections) -> list[int]:
    """As an operation of a graph takes them."""
    return [number for section in sections for number in section]


def _hides_in_graph(output: torch.Tensor, group: str | None, overlapped: bool) -> bool:
    """Whether a compiled program must be kept from undoing an overlap."""
    return torch.compiler.is_compiling() and overlapped and group is not None and not _trains(output)


def _trains(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _recomputes() -> bool:
    """Whether this forward is gradient checkpointing's, in the midst of a backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
