"""Kernels on a GPU give the bits of eager mode on a CPU."""

from __future__ import annotations

import pytest
import torch

from rewired.comm.packing import Layout, Packing, add_up, join_parts, pack_parts, pack_shard, unpack_shards
from rewired.model.quantisation import QuantisedSum, quantised_sum
from tests.rewired.test_kernels import DTYPES, SEVERAL, assert_same, awkward_parts, on_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("ranks", "dtype"), [*((0, dtype) for dtype in DTYPES), (2, torch.bfloat16)])
def test_a_payload(ranks: int, dtype: torch.dtype, device: str) -> None:
    """In one process, and as ranks compute it."""
    for tokens in (1, 5, 300):
        parts = awkward_parts(dtype, SEVERAL, tokens, shards=8)
        expected = quantised_sum(parts, SEVERAL)
        on_device = parts.to(device)
        found = on_ranks(on_device, SEVERAL, ranks) if ranks else quantised_sum(on_device, SEVERAL)
        assert_same(QuantisedSum(*(each.cpu() for each in found)), expected)


@pytest.mark.parametrize("dtype", ["int8", "int4", "bf16"])
def test_what_a_training_sends(dtype: str, device: str) -> None:
    """But for rotations, which are matrix products."""
    layout = Layout((100, 3, 1157, 7), (True, False, True, False))
    packing = Packing(dtype, layout)
    shards = torch.randn(4, sum(layout.sizes), generator=torch.Generator().manual_seed(0))
    shards[1, 5], shards[2, 500], shards[3, 100:300] = 3e38, float("nan"), 0
    answers = []
    for where in ("cpu", device):
        packed = torch.stack([pack_shard(shard, packing=packing) for shard in shards.to(where)])
        sent = pack_parts(*layout.split(shards.to(where)), packing=packing)
        total = join_parts(*add_up(sent, packing=packing), layout=layout, factor=0.25)
        answers.append([unpack_shards(packed, packing=packing, dtype=torch.bfloat16).cpu(), total.cpu()])
    for found, expected in zip(*answers, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
