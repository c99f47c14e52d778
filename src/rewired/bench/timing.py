"""Runs timed in turns, so that what slows the machine down slows all of them, on one rank or many."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import distributed

from rewired.progress import Progress

Key = TypeVar("Key", bound=Hashable)


def interleaved(runs: Mapping[Key, Callable[[], None]], rounds: int, what: str) -> dict[Key, list[float]]:
    """The seconds of every run in every round, those of the slowest rank.

    Each round starts with another run, and every other round goes backwards: none always follows the same one.
    """
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    keys: Sequence[Key] = list(runs)
    with Progress(what, rounds) as progress:
        for turn in range(rounds):
            start = turn % len(keys)
            order = [*keys[start:], *keys[:start]]
            for key in reversed(order) if turn % 2 else order:
                samples[key].append(_seconds(runs[key]))
            progress.advance()
    return _of_slowest_rank(samples)


def _seconds(run: Callable[[], None]) -> float:
    if distributed.is_initialized():
        distributed.barrier()
    _settle()
    start = time.perf_counter()
    run()
    _settle()
    return time.perf_counter() - start


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _of_slowest_rank(samples: dict[Key, list[float]]) -> dict[Key, list[float]]:
    if not distributed.is_initialized():
        return samples
    times = torch.tensor(list(samples.values()), dtype=torch.float64, device=_device_of_group())
    distributed.all_reduce(times, op=distributed.ReduceOp.MAX)
    return dict(zip(samples, times.tolist(), strict=True))


def _device_of_group() -> str:
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"
