"""The first of several ranks, alone on its device: collectives take their time, and nothing arrives.

So one GPU shows what tensor parallelism costs and what a wiring hides of it: launches, streams and graphs, and what a
collective's blocks take from the compute beside them are real. Only the wire is not, nor ranks that come late.

On a GPU it has only warmed up, until its time was over. On a CPU waits sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Work
from torch.distributed import ProcessGroup

from rewired.model.side_stream import PATIENT, URGENT, SideStream, UnderWay
from rewired.plan.all_reduce_time import AllReduce
from rewired.plan.machine import serving_machine
from rewired.plan.machine_from_bench import with_all_reduces

from .request import Emulation

BACKEND = "emulated"
SCALES = (1.0, 0.5, 2.0)  # of the times


@dataclass(frozen=True)
class Times:
    """Seconds of collectives by bytes: of the tensor that is summed, or of the rows that all ranks are sent or send."""

    all_reduce: Callable[[float], float]
    all_to_all: Callable[[float], float]
    all_gather: Callable[[float], float]

    @classmethod
    def of(cls, link: str, ranks: int) -> Times:
        """Those that `rewired plan` counts with for hardware and its library, such as `h100:vllm`, or a bench's.

        Raises ValueError for hardware that is not known, and for what is no results.json.
        """
        if link.endswith(".json"):
            machine = with_all_reduces(serving_machine("h100", "vllm", ranks), Path(link))
        else:
            hardware, _, library = link.partition(":")
            machine = serving_machine(hardware, library or "vllm", ranks)
        all_reduce = replace(machine.all_reduce, slack=0.0)
        scatter, gather = (partial(_half, all_reduce, ranks, half) for half in range(2))
        return cls(partial(all_reduce.seconds, gpus=ranks), scatter, gather)


def _half(all_reduce: AllReduce, ranks: int, half: int, size: float) -> float:
    return all_reduce.halves_seconds(size, ranks)[half]


_ProcessGroup: Any = ProcessGroup  # whose stubs list overloads that torch does not call


class EmulatedGroup(_ProcessGroup):
    """A process group of which this process is rank 0. What it would receive is what it has itself.

    `sent` counts bytes as `communication.py` does: torch's dispatcher does not see what Python calls here.
    `line.scale` makes all times longer or shorter, also in CUDA graphs that were captured before; `scales` has one for
    each link that the group can stand for.
    """

    def __init__(self, ranks: int, times: Times, line: Line, scales: Mapping[str, float]) -> None:
        super().__init__(0, ranks)
        self.times, self.line, self.scales = times, line, scales
        self.sent, self.share = 0.0, (ranks - 1) / ranks

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        self.sent += 2 * self.share * tensor.nbytes
        return self.line.run(self.times.all_reduce(tensor.nbytes), tensor, tensor)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        (output,), (own,) = outputs, inputs
        self.sent += self.share * output.nbytes
        return self.line.run(self.times.all_gather(output.nbytes), own, output)

    def alltoall_base(
        self, output: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Work:
        self.sent += self.share * rows.nbytes
        return self.line.run(self.times.all_to_all(rows.nbytes), rows, output)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        """On a CPU, ranks exchange by these: of one other rank, its share of the time."""
        (row,) = tensors
        seconds = self.times.all_to_all(self.size() * row.nbytes) / (self.size() - 1)
        return self.line.run(seconds, row, row.zero_())

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Work:
        self.sent += tensors[0].nbytes
        return _Done()

    def barrier(self, opts: Any = None) -> Work:
        return _Done()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return _Done()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def pg_name(self) -> str:
        name: str = distributed.distributed_c10d._world.pg_names[self]
        return name

    @property
    def group_name(self) -> str:
        return self.pg_name


class GpuLine:
    """Collectives one after another, on a stream of their own, as NCCL's run."""

    def __init__(self, device: torch.device, emulation: Emulation) -> None:
        from .hold_kernel import hold  # Triton is on GPUs only

        self.hold, self.blocks = hold, emulation.blocks
        self.side = SideStream(device, URGENT if emulation.is_urgent else PATIENT)
        self.per_mille = torch.tensor([1000], device=device)

    @property
    def scale(self) -> float:
        return self.per_mille.item() / 1000

    @scale.setter
    def scale(self, scale: float) -> None:
        self.per_mille.fill_(round(1000 * scale))

    def run(self, seconds: float, source: torch.Tensor, target: torch.Tensor) -> Work:
        nanoseconds = round(1e9 * seconds)
        _, event = self.side.run(lambda: self.hold(source, target, nanoseconds, self.per_mille, self.blocks))
        return UnderWay(event, source, target)


class CpuLine:
    """Collectives one after another, that take no processor: a wait sleeps until its own has ended."""

    scale = 1.0

    def __init__(self) -> None:
        self.free_at = 0.0

    def run(self, seconds: float, source: torch.Tensor, target: torch.Tensor) -> Work:
        self.free_at = max(time.monotonic(), self.free_at) + self.scale * seconds
        if target is not source:
            target.view(-1, source.numel()).copy_(source.view(1, -1))
        return _Until(self.free_at)


Line = GpuLine | CpuLine


class _Until(Work):
    def __init__(self, end: float) -> None:
        super().__init__()
        self.end = end

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        time.sleep(max(0.0, self.end - time.monotonic()))
        return True


class _Done(Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def join(ranks: int, link: str, device: torch.device, emulation: Emulation) -> EmulatedGroup:
    """Make this process the first of so many ranks, whose links take the times of `link`, half and twice as long."""
    scales = {link if scale == 1 else f"{link} x {scale:g}": scale for scale in SCALES}

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
        line = GpuLine(device, emulation) if device.type == "cuda" else CpuLine()
        return EmulatedGroup(size, Times.of(link, ranks), line, scales)

    distributed.Backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])
    distributed.init_process_group(BACKEND, store=distributed.HashStore(), rank=0, world_size=ranks)
    group: Any = distributed.group.WORLD
    return group
