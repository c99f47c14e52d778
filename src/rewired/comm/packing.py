"""What FSDP2 sends, as bytes: matrices quantised in blocks of 128 numbers, all else as it is.

FSDP2 sends the parameters of a layer in one flat shard, one after another. The weights of Linear and Embedding modules
make nearly all of it; norms and gains, which are few and of another size, would spoil the blocks that they fell into.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from rewired.model.kernels import kernel
from rewired.model.payload import FORMATS, shares_of
from rewired.model.quantisation import pack, sum_in_order, unpack
from rewired.rotate.hadamard import sylvester

BLOCK = 128  # numbers that share a scale, and are rotated together
BITS = {"int8": 8, "int4": 4}


class Parts(NamedTuple):
    """A shard's matrices in blocks, [..., n, 128], and its other numbers, [..., m], both in float32."""

    blocks: torch.Tensor
    others: torch.Tensor

    @property
    def layout(self) -> Layout:
        """One of as many numbers."""
        return Layout((self.others.shape[-1], self.blocks.shape[-2] * BLOCK), (False, True))


@dataclass(frozen=True)
class Layout:
    """The parameters of a flat shard: how many numbers each has, and whether it is a matrix to be quantised."""

    sizes: tuple[int, ...]
    is_matrix: tuple[bool, ...]

    def split(self, flat: torch.Tensor) -> Parts:
        """[..., sum of sizes] -> its parts; the last block ends in zeros."""
        parts = flat.split(list(self.sizes), dim=-1)
        matrices = self._chosen(parts, True).float()
        if rest := -matrices.shape[-1] % BLOCK:  # padding makes a copy, with nothing, too
            matrices = pad(matrices, (0, rest))
        return Parts(matrices.unflatten(-1, (-1, BLOCK)), self._chosen(parts, False).float())

    def join(self, parts: Parts) -> torch.Tensor:
        """The inverse of `split`, in float32."""
        matrices = iter(parts.blocks.flatten(-2)[..., : self.numbers(True)].split(self._sizes(True), dim=-1))
        others = iter(parts.others.split(self._sizes(False), dim=-1))
        return torch.cat([next(matrices if is_matrix else others) for is_matrix in self.is_matrix], dim=-1)

    def numbers(self, is_matrix: bool) -> int:
        """How many numbers the matrices have, or all else."""
        return sum(self._sizes(is_matrix))

    def _sizes(self, is_matrix: bool) -> list[int]:
        return [size for size, kind in zip(self.sizes, self.is_matrix, strict=True) if kind == is_matrix]

    def _chosen(self, parts: tuple[torch.Tensor, ...], is_matrix: bool) -> torch.Tensor:
        chosen = [part for part, kind in zip(parts, self.is_matrix, strict=True) if kind == is_matrix]
        return torch.cat(chosen, dim=-1) if chosen else parts[0][..., :0]


@dataclass(frozen=True)
class Packing:
    """Parts as bytes and back. `dtype` is what the blocks are sent in: int8, int4 or bf16; all else is float32."""

    dtype: str
    layout: Layout

    def pack(self, parts: Parts) -> torch.Tensor:
        """-> [..., bytes], uint8."""
        if self.bits is None:
            blocks = parts.blocks.to(torch.bfloat16).contiguous().view(torch.uint8)
        else:
            blocks = pack(parts.blocks, self.bits)
        return torch.cat([parts.others.contiguous().view(torch.uint8), blocks.flatten(-2)], dim=-1)

    def unpack(self, packed: torch.Tensor) -> Parts:
        """The inverse of `pack`, but for what was rounded."""
        others, blocks = packed.tensor_split([4 * self.layout.numbers(False)], dim=-1)
        size = 2 * BLOCK if self.bits is None else FORMATS[self.bits].group_bytes(BLOCK)
        rows = blocks.unflatten(-1, (blocks.shape[-1] // size, size))
        numbers = _as(torch.bfloat16, rows).float() if self.bits is None else unpack(rows, self.bits, torch.float32)
        return Parts(numbers, _as(torch.float32, others))

    @property
    def bits(self) -> int | None:
        """Of a number of a block; None where nothing is quantised."""
        return BITS.get(self.dtype) if self.layout.numbers(True) else None


@kernel()
def pack_shard(shard: torch.Tensor, *, packing: Packing) -> torch.Tensor:
    """[numbers] -> [bytes]."""
    return packing.pack(packing.layout.split(shard))


@kernel()
def unpack_shards(packed: torch.Tensor, *, packing: Packing, dtype: torch.dtype) -> torch.Tensor:
    """[ranks, bytes] -> [ranks, numbers], in `dtype`."""
    return packing.layout.join(packing.unpack(packed)).to(dtype)


@kernel()
def repack(packed: torch.Tensor, *, packing: Packing, kept: Packing) -> torch.Tensor:
    """[..., bytes] -> [..., bytes], by `kept`."""
    return kept.pack(packing.unpack(packed))


@kernel()
def split_slices(gradients: torch.Tensor, rotation: torch.Tensor | None = None, *, layout: Layout) -> Parts:
    """Each rank's slice, [nodes, ranks, numbers], as parts, [ranks, nodes, ...]."""
    blocks, others = layout.split(gradients)
    return Parts(_rotated(blocks, rotation).transpose(0, 1), others.transpose(0, 1))


def in_chunks(parts: Parts, count: int) -> Iterator[tuple[slice, Parts]]:
    """`parts` in at most so many chunks, each with which of the blocks it has; the first has all other numbers, too."""
    blocks = parts.blocks.shape[-2]
    for chunk in shares_of(blocks, max(1, min(count, blocks))):
        yield chunk, Parts(parts.blocks[..., chunk, :], parts.others if chunk.start == 0 else parts.others[..., :0])


@kernel()
def pack_parts(blocks: torch.Tensor, others: torch.Tensor, *, packing: Packing) -> torch.Tensor:
    return packing.pack(Parts(blocks, others))


@kernel()
def add_up(packed: torch.Tensor, *, packing: Packing) -> Parts:
    """The sum of what ranks sent, [ranks, ..., bytes]."""
    blocks, others = packing.unpack(packed)
    return Parts(sum_in_order(blocks), sum_in_order(others))


@kernel()
def join_parts(
    blocks: torch.Tensor, others: torch.Tensor, rotation: torch.Tensor | None = None, *, layout: Layout, factor: float
) -> torch.Tensor:
    """A slice's parts as its numbers, [numbers], times a factor."""
    return layout.join(Parts(_rotated(blocks, rotation), others)).mul_(factor)


def _as(dtype: torch.dtype, packed: torch.Tensor) -> torch.Tensor:
    """The numbers that `packed` are the bytes of, in a copy: a slice of bytes may begin anywhere."""
    numbers = packed.new_empty(*packed.shape[:-1], packed.shape[-1] // dtype.itemsize, dtype=dtype)
    numbers.view(torch.uint8).copy_(packed)
    return numbers


def _rotated(blocks: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    return blocks if rotation is None else blocks @ rotation


@cache
def hadamard(device: torch.device) -> torch.Tensor:
    """The Hadamard matrix over sqrt(128), [128, 128], float32.

    Times it, a block spreads a large number's share, so that the scale need not be made for that (SDP4Bit, arXiv
    2410.15526). Kernels take it as an argument: a compiler would make it anew in every call.
    """
    return sylvester(BLOCK).float().to(device)
