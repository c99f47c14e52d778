"""Weights on four ranks, of one, two or four nodes: what each gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from rewired.comm.nodes import Nodes
from rewired.comm.packing import Packing
from rewired.comm.weights import DifferenceGather, WeightGather

from .slices import LAYOUT, NUMBERS, RANKS, rounded


def shard(rank: int) -> torch.Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(rank))


def weights(nodes: Nodes) -> dict[str, Any]:
    """FSDP2 gives a view into the output for the input."""
    arrived = {}
    for name, packing in {
        "int8": Packing("int8", LAYOUT),
        "bf16": Packing("bf16", LAYOUT),
        "as they are": None,
    }.items():
        output = torch.empty(RANKS * NUMBERS)
        own = output.view(RANKS, NUMBERS)[distributed.get_rank()]
        own.copy_(shard(distributed.get_rank()))
        WeightGather(nodes, packing, keeps=False)(output, own, distributed.group.WORLD)
        arrived[name] = output.numpy()
    return arrived


def kept_in_16_bits(nodes: Nodes) -> list[Any]:
    """What forward gathers in 8 bits, what backward, and what forward does after a step."""
    gather = WeightGather(nodes, Packing("int8", LAYOUT), True, Packing("bf16", LAYOUT))
    arrived = []
    for step in range(3):
        output = torch.empty(RANKS * NUMBERS)
        gather(output, shard(distributed.get_rank() + 10 * (step == 2)), distributed.group.WORLD)
        arrived.append(output.numpy())
        if step == 1:
            gather.forget()
    return arrived


def test_a_secondary_shard_in_16_bits_is_what_forward_received(found: list[dict[str, Any]]) -> None:
    for one in found:
        forward, backward, later = (torch.from_numpy(each).view(RANKS, NUMBERS) for each in one["in 16 bits"])
        for rank in range(RANKS):
            received = rounded(shard(rank), "int8")
            torch.testing.assert_close(forward[rank], received, rtol=1e-6, atol=1e-7)
            assert torch.equal(backward[rank], rounded(forward[rank], "bf16"))
            torch.testing.assert_close(later[rank], rounded(shard(rank + 10), "int8"), rtol=1e-6, atol=1e-7)


STEPS = 4


def stepped(rank: int, step: int) -> torch.Tensor:
    """As `shard`, of which each step changes little."""
    changes = torch.randn(STEPS, NUMBERS, generator=torch.Generator().manual_seed(100 + rank))
    return shard(rank) + 0.01 * changes[:step].sum(0)


def differences(nodes: Nodes) -> list[Any]:
    """What is gathered before each step, twice; before the last one by a training that is resumed."""
    gather, arrived, rank = DifferenceGather(nodes, LAYOUT), [], distributed.get_rank()
    for step in range(STEPS):
        if step == STEPS - 1:
            state, gather = gather.state(), DifferenceGather(nodes, LAYOUT)
            gather.resume(state)
        for _ in range(2):
            output = torch.empty(RANKS * NUMBERS)
            gather(output, stepped(rank, step), distributed.group.WORLD)
        gather.forget()
        arrived.append(output.numpy())
    return arrived


@pytest.mark.parametrize("size", [1, 2])
def test_a_difference_is_to_what_was_gathered_before(size: int, found: list[dict[str, Any]]) -> None:
    for one in found:
        for rank in range(RANKS):
            held = rounded(shard(rank), "bf16")
            for step, arrived in enumerate(one["differences"][size]):
                difference = rounded(stepped(rank, step) - held, "int4")
                held = rounded(held + difference, "bf16")
                held[:5] = stepped(rank, step)[:5]
                whole = torch.from_numpy(arrived).view(RANKS, NUMBERS)
                torch.testing.assert_close(whole[rank], held, rtol=1e-6, atol=1e-7)


def test_differences_do_not_add_up_their_errors(found: list[dict[str, Any]]) -> None:
    for one in found:
        for step, arrived in enumerate(one["differences"][2]):
            exact = torch.stack([stepped(rank, step) for rank in range(RANKS)])
            error = (torch.from_numpy(arrived).view(RANKS, NUMBERS) - exact).norm() / exact.norm()
            assert error < 0.003  # of 8 bits: 0.007


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_gather_the_same_weights_in_the_ranks_order(size: int, found: list[dict[str, Any]]) -> None:
    for one in found:
        for dtype, arrived in one["weights"][size].items():
            whole = torch.from_numpy(arrived).view(RANKS, NUMBERS)
            for rank in range(RANKS):
                expected = shard(rank) if dtype == "as they are" else rounded(shard(rank), dtype)
                torch.testing.assert_close(whole[rank], expected, rtol=1e-6, atol=1e-7)
