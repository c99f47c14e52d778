"""Exchanges between ranks against torch's own, and why they are not those: receives come first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from rewired.model.exchange import all_gather, all_to_all, wait
from rewired.model.wide_sum import start_wide_sum
from rewired.ranks import run_on_ranks

RANKS = 3


def test_an_all_to_all_and_an_all_gather_are_torch_s(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["all-to-all"] and one["all-gather"]


def test_several_are_under_way_at_a_time(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        assert one["under way"] == [[10 * k + rank for k in range(RANKS)], list(range(RANKS))]


def test_16_bits_are_added_up_in_float32(found: list[dict[str, Any]]) -> None:
    """Of more than two ranks: a sum of two is rounded once in any case."""
    parts = torch.stack([numbers(rank) for rank in range(RANKS)])
    expected = parts.double().sum(0).to(torch.bfloat16)
    rounded_twice = (parts[0] + parts[1]) + parts[2]
    assert (rounded_twice != expected).any()
    for one in found:
        assert one["wide sum"] == expected.tolist()


def numbers(rank: int) -> torch.Tensor:
    """Of no whole share for each rank, and of which most digits are lost if small ones are added to a large one."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(5, 10, generator=generator) * 2.0 ** (-4 * rank)).to(torch.bfloat16)


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
        "wide sum": wait(start_wide_sum(numbers(rank), group.group_name)).tolist(),
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
