"""A parameter group of four ranks whose slices divide by nothing, and what arrives of a slice."""

from __future__ import annotations

import torch

from rewired.comm.options import Comm
from rewired.comm.packing import Layout

RANKS = 4
LAYOUT = Layout((5, 300, 40), (False, True, True))  # 2 blocks and 84 numbers more
NUMBERS = 345
BF16 = Comm("bf16", "bf16", "bf16", hadamard=False)
_BITS = {"int4": 4, "int8": 8}


def rounded(numbers: torch.Tensor, dtype: str) -> torch.Tensor:
    """The numbers of a slice as they arrive, written from the page on comm alone."""
    if dtype == "bf16":
        return torch.cat([numbers[:5], numbers[5:].bfloat16().float()])
    most, arrived = 2 ** (_BITS[dtype] - 1) - 1, [numbers[:5]]
    for block in numbers[5:].split(128):
        scale = (block.abs().max() / most).bfloat16().float()
        arrived.append((block / scale).round().clamp(-most, most) * scale)
    return torch.cat(arrived)
