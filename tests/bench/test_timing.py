"""Runs are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import distributed

from rewired.bench.timing import interleaved
from rewired.ranks import run_on_ranks


def test_each_round_runs_all_and_none_always_follows_the_same() -> None:
    log: list[str] = []

    def logs(name: str) -> Callable[[], None]:
        return lambda: log.append(name)

    samples = interleaved({name: logs(name) for name in "abc"}, 4, "test")
    assert "".join(log) == "abc" + "acb" + "cab" + "cba"
    assert {name: len(seconds) for name, seconds in samples.items()} == {"a": 4, "b": 4, "c": 4}


def test_ranks_agree_on_the_time_of_the_slowest() -> None:
    one, other = run_on_ranks(sleep_on_the_second_rank, 2)
    assert one == other
    assert min(one) >= 0.05


def sleep_on_the_second_rank() -> list[float]:
    return interleaved({"sleep": lambda: time.sleep(0.05 * distributed.get_rank())}, 3, "test")["sleep"]
