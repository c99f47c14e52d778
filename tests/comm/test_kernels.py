"""What a training sends, by kernels that Inductor compiles, here for a CPU: the bits of eager mode."""

from __future__ import annotations

import pytest
import torch

from rewired.comm.packing import (
    Packing,
    add_up,
    hadamard,
    join_parts,
    pack_parts,
    pack_shard,
    repack,
    split_slices,
    unpack_shards,
)
from tests.rewired.test_kernels import compiling

from .test_packing import LAYOUT

HADAMARD = hadamard(torch.device("cpu"))


def both_ways(packing: Packing) -> list[torch.Tensor]:
    """Weights there and back; gradients of two nodes of two ranks summed up as a rank sends and receives them."""
    slices = torch.randn(2, 2, sum(LAYOUT.sizes), generator=torch.Generator().manual_seed(0))
    slices[0, 1, :128], slices[1, 0, 200], slices[1, 1, 4] = 0, 3e38, float("nan")
    packed = torch.stack([pack_shard(shard, packing=packing) for shard in slices[0]])
    weights = unpack_shards(packed, packing=packing, dtype=torch.bfloat16)
    sent = pack_parts(*split_slices(slices, HADAMARD, layout=LAYOUT), packing=packing)
    total = join_parts(*add_up(add_up_packed(sent, packing), packing=packing), HADAMARD, layout=LAYOUT, factor=0.25)
    return [packed, weights, total, repack(packed, packing=packing, kept=Packing("bf16", LAYOUT))]


def add_up_packed(sent: torch.Tensor, packing: Packing) -> torch.Tensor:
    return pack_parts(*add_up(sent, packing=packing), packing=packing)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4", "bf16"])
def test_compiled_they_give_the_bits_of_eager_mode(dtype: str) -> None:
    packing = Packing(dtype, LAYOUT)
    expected = both_ways(packing)
    with compiling() as graphs:
        found = both_ways(packing)
        assert graphs() > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
