"""How the parts of shards become their sum: a `Reduction`, plain or quantised.

    put_in    of the held shards' parts, [r, B, T, C], what is summed over the ranks: [B, T, C], or still [r, B, T, C]
    start     its outcome, under way
    finish    a wait for the total, whichever reduction it is of

An outcome is the total, [B, T, C], alone, or followed by what rounding leaves of each shard's part and of the sum of
the groups that it adds up, [r, B, T, C] each. What a reduction does to gradients is in `collectives.py`.

A compiled graph holds operations that a compiler neither opens nor moves. Inductor (torch 2.13) orders a graph by
memory and fuses what reads an update with kernels that run before its bare `wait_tensor`. Then the overlap is gone, or
the result is wrong. So a wait is one operation with the addition that needs it, and where the next module hides an
all-reduce, the stream that this module reads comes out of the operation that starts it: the data's own order is the
overlap's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import all_reduce
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.functional import pad

from .payload import Section, Sections
from .quantisation import quantised_sum
from .quantised_reduction import RankReduction
from .sharding import summed
from .wide_sum import start_wide_sum

Outcome = tuple[torch.Tensor, ...]

_wait = torch.ops._c10d_functional.wait_tensor


@dataclass(frozen=True)
class Reduction:
    """A sum over the ranks of a process group, by its name; where it has none, over the shards of this process.

    With `sections`, its parts are sent quantised, as their sum is; without, activations as they are.
    """

    group: str | None
    sections: Sections = ()
    adds_in_float32: bool = False  # 16 bits that ranks send as they are, which takes an exchange

    def put_in(self, parts: torch.Tensor) -> torch.Tensor:
        return parts if self.sections else summed(parts)

    def prepare(self, own: torch.Tensor) -> tuple[Outcome, Callable[[], torch.Tensor]]:
        """The outcome as far as it is there at once, the total only by its shape; and what starts the total."""
        if not self.sections:
            return (own,), lambda: own if self.group is None else self._begin(own, self.group)
        if self.group is None:
            outcome = quantised_sum(own, self.sections)
            return outcome, lambda: outcome.total
        reduction = RankReduction(own, self.sections, self.group)
        return reduction.outcome, reduction.start

    def start(self, own: torch.Tensor) -> Outcome:
        """Outside a graph, the total is a tensor that waits when it is used, whoever uses it."""
        if self.sections and torch.compiler.is_compiling():
            # in one process, too: Inductor would leave out the rounding of scales, a conversion there and back
            return tuple(land_and_launch(None, None, own, self.as_numbers(), self.group))
        (_, *left), begin = self.prepare(own)
        waits = self.group is not None and not torch.compiler.is_compiling()
        return AsyncCollectiveTensor(begin()) if waits else begin(), *left

    def sum(self, own: torch.Tensor) -> Outcome:
        """The outcome for whoever reads it next, where nothing hides it and nothing trains; `own` may be gone.

        A plain one is in place, as transformers' own ranks sum: no copy, and nothing to wait for.
        """
        if self.sections or self.group is None or self.group in _start_of_engine:
            return self.start(own)
        own = own.contiguous()
        all_reduce(own, group=_resolve_process_group(self.group))  # type: ignore[arg-type]  # a str
        return (own,)

    def defer(self, own: torch.Tensor) -> Outcome:
        """The same, but for the total, which is not started before it is read."""
        (total, *left), begin = self.prepare(own)
        return WhenRead(total, lambda: finish(begin())), *left

    def _begin(self, own: torch.Tensor, group: str) -> torch.Tensor:
        start = start_wide_sum if self.adds_in_float32 and own.itemsize == 2 else start_all_reduce
        return start(own, group)

    def as_numbers(self) -> list[int]:
        """The sections, as an operation of a graph takes them."""
        return [number for section in self.sections for number in section]


def finish(total: torch.Tensor) -> torch.Tensor:
    """A total that was started, complete. One that a compiled program started waits for nobody by itself."""
    if isinstance(total, AsyncCollectiveTensor):
        return total.trigger_wait()
    return land(None, total, None) if torch.compiler.is_compiling() else _wait(total)


def add(settled: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """[B, T, H] plus [B, T, C] in its first channels, in the dtype of `settled`."""
    missing = settled.size(-1) - update.size(-1)
    if missing:
        update = pad(update, (0, missing))
    return settled + (update if update.dtype == settled.dtype else update.to(settled.dtype))


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


_start_of_engine: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def start_sums_by(group: str, start: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let an engine's own all-reduce start the sums of a process group; `wait_tensor` waits for what it returns."""
    _start_of_engine[group] = start


def start_all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the ranks, under way: to be read only after a wait."""
    if group in _start_of_engine:
        # an engine reads it on a stream of its own, while a compiled program hands its memory to the next kernel
        return _start_of_engine[group](tensor.clone(memory_format=torch.contiguous_format))
    return torch.ops._c10d_functional.all_reduce(tensor.contiguous(), "sum", group)


# ---- operations of a compiled graph ----


@torch.library.custom_op("rewired::land", mutates_args=())
def land(settled: torch.Tensor | None, total: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    """Wait, not before `after` is there, and add to the stream; without one, the total as it arrived."""
    arrived = _wait(total)
    return arrived.clone() if settled is None else add(settled, arrived)


@torch.library.custom_op("rewired::land_and_launch", mutates_args=())
def land_and_launch(
    settled: torch.Tensor | None, total: torch.Tensor | None, own: torch.Tensor, sections: list[int], group: str | None
) -> list[torch.Tensor]:
    """The stream, if there is one, after what was in flight has landed, if anything; and the next outcome, under way.

    `sections` are flat, and none are those of a plain sum.
    """
    landed = [] if settled is None else [settled.clone() if total is None else add(settled, _wait(total))]
    of_three = tuple(Section(*sections[first : first + 3]) for first in range(0, len(sections), 3))
    (_, *left), begin = Reduction(group, of_three).prepare(own)
    return [*landed, begin(), *left]


@torch.library.custom_op("rewired::own", mutates_args=())
def own(output: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """`output`, out of the buffer that another operation has filled: the last projection, or that which gave `after`.

    Inductor (torch 2.13) may fuse what reads such a buffer with kernels that run before it is filled, if the projection
    is an operation that mutates it (oneDNN's products, scaled ones on CUDA): `tests/rewired/inductor_early_read.py`.
    """
    return output.clone()


@land.register_fake
def _(settled: torch.Tensor | None, total: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(total if settled is None else settled)


@land_and_launch.register_fake
def _(
    settled: torch.Tensor | None, total: torch.Tensor | None, own: torch.Tensor, sections: list[int], group: str | None
) -> list[torch.Tensor]:
    shapes = [own.shape[1:], own.shape, own.shape] if sections else [own.shape]
    return [*([] if settled is None else [torch.empty_like(settled)]), *map(own.new_empty, shapes)]


own.register_fake(lambda output, after=None: torch.empty_like(output))
