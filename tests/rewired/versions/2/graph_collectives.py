"""The collectives as a compiled graph holds them: operations that a compiler neither opens nor moves.

Inductor (torch 2.13) orders a graph by memory and fuses what reads an update with kernels that run before its bare
`wait_tensor`. Then the overlap is gone, or the result is wrong. So a wait is one operation with the addition that needs
it, and where the next module hides an all-reduce, the stream that this module reads comes out of the operation that
starts it: the data's own order is the overlap's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from . import quantisation, quantised_reduction
from .payload import Section, Sections

_wait = torch.ops._c10d_functional.wait_tensor


@torch.library.custom_op("rewired::land", mutates_args=())
def land(settled: torch.Tensor, in_flight: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    """Wait, and add to the stream; not before `after` is there."""
    return add(settled, _wait(in_flight))


@torch.library.custom_op("rewired::land_and_launch", mutates_args=())
def land_and_launch(
    settled: torch.Tensor, in_flight: torch.Tensor | None, output: torch.Tensor, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Land what is in flight, if anything, and start the next all-reduce."""
    landed = settled.clone() if in_flight is None else add(settled, _wait(in_flight))
    return landed, start_all_reduce(output, group)


@torch.library.custom_op("rewired::land_and_launch_quantised", mutates_args=())
def land_and_launch_quantised(
    settled: torch.Tensor, in_flight: torch.Tensor | None, parts: torch.Tensor, sections: list[int], group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where the next reduction is `start_quantised_sum`."""
    landed = settled.clone() if in_flight is None else add(settled, _wait(in_flight))
    return landed, *quantised_reduction.start_quantised_sum(parts, as_sections(sections), group)


@torch.library.custom_op("rewired::start_quantised_sum", mutates_args=())
def start_quantised_sum(
    parts: torch.Tensor, sections: list[int], group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A `Reduction` over the ranks, under way; `sections` are flat."""
    return quantised_reduction.start_quantised_sum(parts, as_sections(sections), group)


@torch.library.custom_op("rewired::quantised_sum", mutates_args=())
def quantised_sum(parts: torch.Tensor, sections: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A `Reduction` in one process. Inductor would leave out the rounding of scales, a conversion there and back."""
    return quantisation.quantised_sum(parts, as_sections(sections))


@torch.library.custom_op("rewired::after", mutates_args=())
def after(tensor: torch.Tensor, landed: torch.Tensor) -> torch.Tensor:
    """`tensor`, which a wait has filled: that of `landed`."""
    return tensor.clone()


@torch.library.custom_op("rewired::arrived", mutates_args=())
def arrived(in_flight: torch.Tensor) -> torch.Tensor:
    """An update that was under way, for an engine that reads it as it is."""
    return _wait(in_flight).clone()


@torch.library.custom_op("rewired::all_reduce", mutates_args=())
def all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Start and wait."""
    return _wait(start_all_reduce(tensor, group))


@torch.library.custom_op("rewired::own", mutates_args=())
def own(output: torch.Tensor) -> torch.Tensor:
    """A module's output, out of the buffer that its last projection has filled.

    Inductor (torch 2.13) may fuse what reads such a buffer with kernels that run before it is filled, if the projection
    is an operation that mutates it (oneDNN's products, scaled ones on CUDA): `tests/rewired/inductor_early_read.py`.
    """
    return output.clone()


_start_of_engine: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def start_sums_by(group: str, start: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let an engine's own all-reduce start the sums of a process group; `wait_tensor` waits for what it returns."""
    _start_of_engine[group] = start


def start_all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the ranks, under way: to be read only after a wait."""
    if group in _start_of_engine:
        return _start_of_engine[group](tensor.contiguous())
    return torch.ops._c10d_functional.all_reduce(tensor.contiguous(), "sum", group)


def add(settled: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """[B, T, H] plus [B, T, C] in its first channels, in the dtype of `settled`."""
    missing = settled.size(-1) - update.size(-1)
    if missing:
        update = pad(update, (0, missing))
    return settled + (update if update.dtype == settled.dtype else update.to(settled.dtype))


def as_sections(flat: list[int]) -> Sections:
    return tuple(Section(*flat[first : first + 3]) for first in range(0, len(flat), 3))


def _like_reduction(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return parts.new_empty(parts.shape[1:]), parts.new_empty(parts.shape), parts.new_empty(parts.shape)


land.register_fake(lambda settled, in_flight, after: torch.empty_like(settled))
land_and_launch.register_fake(
    lambda settled, in_flight, output, group: (torch.empty_like(settled), output.new_empty(output.shape))
)
land_and_launch_quantised.register_fake(
    lambda settled, in_flight, parts, sections, group: (torch.empty_like(settled), *_like_reduction(parts))
)
quantised_sum.register_fake(lambda parts, sections: _like_reduction(parts))
start_quantised_sum.register_fake(lambda parts, sections, group: _like_reduction(parts))
after.register_fake(lambda tensor, landed: torch.empty_like(tensor))
arrived.register_fake(torch.empty_like)
all_reduce.register_fake(lambda tensor, group: tensor.new_empty(tensor.shape))
own.register_fake(torch.empty_like)
