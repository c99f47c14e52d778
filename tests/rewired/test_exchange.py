"""Exchanges between ranks against torch's own, and why they are not those: receives come first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from rewired.model.exchange import all_gather, all_to_all, wait
from rewired.ranks import run_on_ranks

RANKS = 3


def test_an_all_to_all_and_an_all_gather_are_torch_s(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["all-to-all"] and one["all-gather"]


def test_several_are_under_way_at_a_time(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        assert one["under way"] == [[10 * k + rank for k in range(RANKS)], list(range(RANKS))]


def test_a_rank_is_ready_to_receive_before_it_sends(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["order"] == ["recv_"] * (RANKS - 1) + ["send"] * (RANKS - 1)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_on_ranks(exchanged, RANKS)


def exchanged() -> dict[str, Any]:
    group, rank = distributed.group.WORLD, distributed.get_rank()
    rows = torch.randn(RANKS, 5, 7, generator=torch.Generator().manual_seed(rank))
    turned, gathered = torch.empty_like(rows), torch.empty(RANKS * 5, 7)
    distributed.all_to_all_single(turned, rows)
    distributed.all_gather_into_tensor(gathered, rows[0])
    with Names() as order:
        first = all_to_all(10 * rank + torch.arange(RANKS)[:, None], group)
    second = all_gather(torch.tensor(rank), group)
    return {
        "all-to-all": torch.equal(wait(all_to_all(rows, group)), turned),
        "all-gather": torch.equal(wait(all_gather(rows[0], group)).flatten(0, 1), gathered),
        "under way": [wait(second).tolist(), wait(first).flatten().tolist()][::-1],
        "order": order.names,
    }


class Names(TorchDispatchMode):
    """The operations of c10d, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._schema.name.rpartition("::")[2])
        return func(*args, **(kwargs or {}))
