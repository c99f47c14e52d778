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

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .graph_collectives import add, start_all_reduce
from .graph_collectives import all_reduce as all_reduce_in_graph
from .graph_collectives import land as land_in_graph
from .graph_collectives import land_and_launch as land_and_launch_in_graph
from .graph_collectives import land_and_launch_quantised as land_and_launch_quantised_in_graph
from .graph_collectives import start_quantised_sum as start_quantised_sum_in_graph
from .payload import Sections
from .quantisation import quantised_sum
from .quantised_reduction import start_quantised_sum


def launch(output: torch.Tensor, group: str | None, sections: Sections = ()) -> torch.Tensor:
    """Start to sum `output` over the ranks; `land` gives the sum.

    With `sections`, `output` is the held shards' parts, [r, B, T, C], which are sent quantised, as their sum is. The
    gradient is that of the plain sum: straight through.

    While training it sums in float32, which also is the dtype of the gradient that comes back: sums of 16-bit
    gradients diverge (CAAT-Net, section 4).
    """
    if group is None:
        return _sum_here(output, sections) if sections else output
    return _Launch.apply(output, group, sections) if _trains(output) else _start_or_defer(output, group, sections)


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


def land_and_launch(
    settled: torch.Tensor,
    in_flight: torch.Tensor | None,
    output: torch.Tensor,
    group: str | None,
    overlapped: bool,
    sections: Sections = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Land what is in flight, if anything, then launch `output`; `overlapped` says that the next module hides it."""
    if torch.compiler.is_compiling() and overlapped and group is not None and not _trains(output):
        if sections:
            return land_and_launch_quantised_in_graph(settled, in_flight, output, *_columns(sections), group)
        return land_and_launch_in_graph(settled, in_flight, output, group)
    if in_flight is not None:
        settled = land(settled, in_flight, group, after=output)
    return settled, launch(output, group, sections)


def sum_gradients(group: str | None, *replicated: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors themselves; their gradients are summed over the ranks, in float32, in one all-reduce."""
    if group is None or not torch.is_grad_enabled():
        return replicated
    return _SumGradients.apply(group, *replicated)


def split_gradient(replicated: torch.Tensor, ranks: int) -> torch.Tensor:
    """`replicated` itself; each rank passes on its equal part of the gradient, which is the same on all."""
    return _SplitGradient.apply(replicated, ranks) if ranks > 1 and _trains(replicated) else replicated


def start(tensor: torch.Tensor, group: str, sections: Sections = ()) -> torch.Tensor:
    """A reduction under way. Outside a graph, a tensor that waits when it is used, whoever uses it."""
    if torch.compiler.is_compiling():
        if sections:
            return start_quantised_sum_in_graph(tensor, *_columns(sections), group)
        return start_all_reduce(tensor, group)
    return AsyncCollectiveTensor(
        start_quantised_sum(tensor, sections, group) if sections else start_all_reduce(tensor, group)
    )


def finish(in_flight: torch.Tensor) -> torch.Tensor:
    """What `start` started, complete."""
    if isinstance(in_flight, AsyncCollectiveTensor):
        return in_flight.trigger_wait()
    return torch.ops._c10d_functional.wait_tensor(in_flight)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, group: str, sections: Sections) -> torch.Tensor:
        ctx.dtype, ctx.parts = output.dtype, len(output) if sections else None
        return _start_or_defer(_widened(output), group, sections)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        own = finish(gradient).to(ctx.dtype)
        return own if ctx.parts is None else own.expand(ctx.parts, *own.shape), None, None


class _QuantisedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, sections: Sections) -> torch.Tensor:
        ctx.parts = len(parts)
        return quantised_sum(parts, sections)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.expand(ctx.parts, *gradient.shape), None


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


class _RunsIfRead(AsyncCollectiveTensor):
    """An all-reduce that starts when it is waited for: recomputation stops early, and throws most of the last away.

    One that was started and never waited for would be kept, with its tensor, until the process ends.
    """

    output: torch.Tensor
    group: str
    sections: Sections

    def __new__(cls, output: torch.Tensor, group: str, sections: Sections) -> _RunsIfRead:
        deferred = super().__new__(cls, output[0] if sections else output)
        deferred.output, deferred.group, deferred.sections = output, group, sections
        return deferred

    def trigger_wait(self) -> torch.Tensor:
        if not self.completed:
            self.elem = finish(start(self.output, self.group, self.sections))
            self.completed = True
        return self.elem


def _start_or_defer(output: torch.Tensor, group: str, sections: Sections) -> torch.Tensor:
    return _RunsIfRead(output, group, sections) if _recomputes() else start(output, group, sections)


def _sum_here(parts: torch.Tensor, sections: Sections) -> torch.Tensor:
    return _QuantisedSum.apply(parts, sections) if _trains(parts) else quantised_sum(parts, sections)


def _reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return all_reduce_in_graph(tensor, group)
    return finish(start(tensor, group))


def _columns(sections: Sections) -> tuple[list[int], list[int]]:
    """Bits and channels, as an operation of a graph takes them."""
    return [bits for bits, _ in sections], [channels for _, channels in sections]


def _trains(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _recomputes() -> bool:
    """Whether this forward is gradient checkpointing's, in the midst of a backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
