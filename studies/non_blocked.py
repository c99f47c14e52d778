"""`adapt`, but for `comm`'s blocks: one scale for a rank's part of a whole matrix, as in ZeRO++'s non-blocked control.

For comm_smollm2.py alone. The scale is sent with each block as it is with scales of blocks, so that bytes are the same.
"""

from __future__ import annotations

import torch

from rewired.adapt.cli import main
from rewired.adapt.comm import communication, gradients
from rewired.adapt.comm.packing import BLOCK, Packing, Parts
from rewired.model.quantisation import _packed


class NonBlocked(Packing):
    """Packing whose blocks have their matrix's scale."""

    def pack(self, parts: Parts) -> torch.Tensor:
        if self.bits is None:
            return super().pack(parts)
        most = 2 ** (self.bits - 1) - 1
        sizes = [size for size, is_matrix in zip(self.layout.sizes, self.layout.is_matrix, strict=True) if is_matrix]
        assert not any(size % BLOCK for size in sizes), "no block is of two matrices"
        matrices = parts.blocks.split([size // BLOCK for size in sizes], dim=-2)
        scales = torch.cat([_scale(matrix, most).expand(*matrix.shape[:-1], 1) for matrix in matrices], dim=-2)
        numbers = (parts.blocks / torch.where(scales == 0, 1.0, scales.float())).round().clamp(-most, most)
        blocks = _packed(numbers, scales.contiguous(), self.bits)
        return torch.cat([parts.others.contiguous().view(torch.uint8), blocks.flatten(-2)], dim=-1)


def _scale(matrix: torch.Tensor, most: int) -> torch.Tensor:  # [..., n, 128] -> [..., 1, 1]
    return (matrix.abs().amax((-2, -1), keepdim=True) / most).to(torch.bfloat16)


if __name__ == "__main__":
    communication.Packing = gradients.Packing = NonBlocked  # type: ignore[misc]
    main()
