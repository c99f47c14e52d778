"""What an all-reduce takes, by its size: the measured times of a link."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import distributed
from torch.distributed import ProcessGroup

SIZES = tuple(4**power for power in range(6, 13))  # bytes, 4 KiB to 16 MiB


@dataclass(frozen=True)
class AllReduceTime:
    """One row under "all_reduce" of `results.json`."""

    gpus: int
    link: str
    bytes: int
    seconds: float  # the median of the rounds
    quartiles: tuple[float, float]


def measure_all_reduces(
    groups: Mapping[str, ProcessGroup],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    sizes: Sequence[int] = SIZES,
    rounds: int = 15,
) -> list[AllReduceTime]:
    """The times on each of `groups`, which are named after their links and hold all ranks, by `sizes` in bytes.

    The groups take turns. All ranks call this together, and return the same: what rank 0 measured.
    """
    rows = []
    for size in sizes:
        tensor = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
        times: dict[str, list[float]] = {name: [] for name in groups}
        for round_number in range(rounds + 1):
            for name, group in groups.items():
                seconds = _seconds(tensor, group)
                if round_number:  # the first one warms up
                    times[name].append(seconds)
        for name, seconds_of_rounds in times.items():
            low, middle, high = quantiles(seconds_of_rounds, n=4, method="inclusive")
            rows.append(AllReduceTime(distributed.get_world_size(), name, size, middle, (low, high)))
    shared = [rows]
    distributed.broadcast_object_list(shared, src=0)
    return shared[0]


def _seconds(tensor: torch.Tensor, group: ProcessGroup) -> float:
    """Of one all-reduce. Small ones are timed several in a row: ranks leave the barrier some time apart."""
    in_a_row = max(1, min(16, (1 << 20) // tensor.nbytes))
    distributed.barrier(group)
    _settle(tensor)
    start = time.perf_counter()
    for _ in range(in_a_row):
        distributed.all_reduce(tensor, group=group)
    _settle(tensor)
    return (time.perf_counter() - start) / in_a_row


def _settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
