"""Over an emulated link gloo's threads run before those that compute, and so does who holds their locks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from rewired.bench.link import EmulatedLink
from rewired.bench.links import groups
from rewired.bench.request import BenchRequest
from rewired.grid.size import TpSize
from rewired.model.exchange import all_gather, wait
from rewired.ranks import run_on_ranks

from .test_link import needs_links


@needs_links
def test_threads_of_both_groups_run_before_those_that_compute() -> None:
    with EmulatedLink.parse("1gbit").between(2) as network:
        for policies in run_on_ranks(policies_of_threads, 2, prepare=network.enter):
            assert policies.pop(0)[1] == os.SCHED_OTHER  # what computes
            assert sum(name == "gloo_tcp_loop" for name, _ in policies) == 2  # one a group
            assert {policy for _, policy in policies} == {os.SCHED_RR}


def policies_of_threads() -> list[tuple[str, int]]:
    """The name and the scheduling of each thread of a rank that is ready to be timed."""
    start_groups()
    threads = sorted(Path("/proc/self/task").iterdir(), key=lambda thread: int(thread.name))
    return [((thread / "comm").read_text().strip(), os.sched_getscheduler(int(thread.name))) for thread in threads]


@needs_links
def test_what_computes_is_as_urgent_while_it_posts() -> None:
    with EmulatedLink.parse("1gbit").between(2) as network:
        for gathered, while_posting, afterwards in run_on_ranks(exchanged, 2, prepare=network.enter):
            assert gathered == [0, 1]
            assert while_posting == {"recv_": os.SCHED_RR, "send": os.SCHED_RR}
            assert afterwards == os.SCHED_OTHER


def exchanged() -> tuple[list[int], dict[str, int], int]:
    start_groups()
    with Policies() as seen:
        in_flight = all_gather(torch.tensor(distributed.get_rank()), distributed.group.WORLD)
    afterwards = os.sched_getscheduler(0)
    return wait(in_flight).tolist(), seen.policies, afterwards


class Policies(TorchDispatchMode):
    """The scheduling of this thread at each operation of c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.policies: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.policies[func._schema.name.rpartition("::")[2]] = os.sched_getscheduler(0)
        return func(*args, **(kwargs or {}))


def start_groups() -> None:
    groups(BenchRequest("small", (), link="1gbit", device="cpu"), TpSize(2))
