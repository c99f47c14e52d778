"""Block Hadamard matrices: what a few channels hold is spread over the group of channels that share a scale.

Quantisation in whole numbers is as fine as the largest channel of a group lets it be. A Hadamard matrix makes channels
of about one size of them (QuaRot, arXiv 2404.00456, rotates whole streams so; here each group by itself).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch

from rewired.model.payload import GROUP
from rewired.model.wiring import Wiring


def block_hadamard(widths: Iterable[int]) -> torch.Tensor:
    """An orthonormal matrix, [H, H], float64, of sections of these widths, none of which reaches into another.

    A section is cut into blocks of 64 channels from its start, as its groups are; what remains, into powers of two.
    """
    blocks = [sylvester(block) for width in widths for block in _blocks(width)]
    return torch.block_diag(*blocks)


def section_widths(wiring: Wiring) -> list[int]:
    """The channels of a stream, cut wherever some reduction of `wiring` ends or goes on with another number of bits."""
    ends = {0, wiring.hidden_size}
    for module in wiring.modules:
        ends |= {module.shared_channels, *accumulate(section.channels for section in module.sections)}
    return [end - start for start, end in pairwise(sorted(ends))]


def _blocks(width: int) -> list[int]:
    rest = width % GROUP
    powers = [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
    return [GROUP] * (width // GROUP) + powers


def sylvester(size: int) -> torch.Tensor:
    """The Hadamard matrix of a power of two over its root, its own inverse, float64: H_2n = [[H, H], [H, -H]]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
    return matrix
