"""Weights on four ranks, of one, two or four nodes: what each gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from rewired.adapt.comm.nodes import Nodes
from rewired.adapt.comm.packing import Packing
from rewired.adapt.comm.weights import WeightGather

from .slices import LAYOUT, NUMBERS, RANKS, rounded

pytestmark = pytest.mark.xdist_group("ranks")


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


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_gather_the_same_weights_in_the_ranks_order(size: int, found: list[dict[str, Any]]) -> None:
    for one in found:
        for dtype, arrived in one["weights"][size].items():
            whole = torch.from_numpy(arrived).view(RANKS, NUMBERS)
            for rank in range(RANKS):
                expected = shard(rank) if dtype == "as they are" else rounded(shard(rank), dtype)
                torch.testing.assert_close(whole[rank], expected, rtol=1e-6, atol=1e-7)
