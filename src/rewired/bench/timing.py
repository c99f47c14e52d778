"""Runs timed in turns, so that what slows the machine down slows all of them, on one rank or many."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from rewired.progress import Progress

Key = TypeVar("Key", bound=Hashable)
Run = Callable[[], Mapping[str, float]]  # gives the seconds of what it measures
Samples = dict[str, list[float]]


def interleaved(runs: Mapping[Key, Run], rounds: int, what: str) -> dict[Key, Samples]:
    """What every run measures in every round, on the slowest rank.

    Each round starts with another run, and every other round goes backwards: none always follows the same one.
    """
    samples: dict[Key, Samples] = {key: {} for key in runs}
    keys: Sequence[Key] = list(runs)
    with Progress(what, rounds) as progress:
        for turn in range(rounds):
            start = turn % len(keys)
            order = [*keys[start:], *keys[:start]]
            for key in reversed(order) if turn % 2 else order:
                for measure, seconds in runs[key]().items():
                    samples[key].setdefault(measure, []).append(seconds)
            progress.advance()
    return {key: _of_slowest_rank(of_run) for key, of_run in samples.items()}


def timed(run: Callable[[], None], group: Any = None) -> float:
    """Seconds of a run that all ranks of a process group begin together."""
    if distributed.is_initialized():
        distributed.barrier(group)
    _settle()
    start = time.perf_counter()
    run()
    _settle()
    return time.perf_counter() - start


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _of_slowest_rank(samples: Samples) -> Samples:
    if not distributed.is_initialized():
        return samples
    device = "cpu" if distributed.get_backend() == "gloo" or not torch.cuda.is_available() else "cuda"
    times = torch.tensor(list(samples.values()), dtype=torch.float64, device=device)
    distributed.all_reduce(times, op=distributed.ReduceOp.MAX)
    return dict(zip(samples, times.tolist(), strict=True))
