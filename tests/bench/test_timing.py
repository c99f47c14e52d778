"""Runs are timed in turns."""

from __future__ import annotations

import time

from torch import distributed

from rewired.bench.timing import Run, interleaved, timed
from rewired.ranks import run_on_ranks


def test_each_round_runs_all_and_none_always_follows_the_same() -> None:
    log: list[str] = []

    def logs(name: str) -> Run:
        def run() -> dict[str, float]:
            log.append(name)
            return {"prefill": float(len(log)), "decode": 0.5}

        return run

    samples = interleaved({name: logs(name) for name in "abc"}, 4, "test")
    assert "".join(log) == "abc" + "acb" + "cab" + "cba"
    assert samples["a"] == {"prefill": [1, 4, 8, 12], "decode": [0.5] * 4}


def test_ranks_agree_on_the_time_of_the_slowest() -> None:
    one, other = run_on_ranks(sleep_on_the_second_rank, 2)
    assert one == other
    assert min(one) >= 0.05


def sleep_on_the_second_rank() -> list[float]:
    naps = {"sleep": lambda: {"nap": timed(lambda: time.sleep(0.05 * distributed.get_rank()))}}
    return interleaved(naps, 3, "test")["sleep"]["nap"]
