"""A GPU kernel that stands for a collective's: it moves the bytes, and holds its processors until a time has passed."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton takes annotations for types of its own
from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS_AT_ONCE = 1024  # of a block
WARPS = 16


def hold(source: torch.Tensor, target: torch.Tensor, nanoseconds: int, per_mille: torch.Tensor, blocks: int) -> None:
    """Fill `target` with `source`, over and over, and stay for `nanoseconds` x `per_mille` / 1000.

    All of it but the last bytes that make no word of eight. `per_mille`, [1], is read when the kernel runs.
    """
    read, written = source.nbytes // 8, target.nbytes // 8
    _hold[(blocks,)](source, read, target, written, nanoseconds, per_mille, BLOCK=WORDS_AT_ONCE, num_warps=WARPS)


@triton.jit
def _hold(source, read, target, written, nanoseconds, per_mille, BLOCK: tl.constexpr):  # noqa: N803 - Triton's habit
    until = _now() + nanoseconds * tl.load(per_mille) // 1000
    source, target = source.to(tl.pointer_type(tl.int64)), target.to(tl.pointer_type(tl.int64))
    within = tl.arange(0, BLOCK)
    for first in range(tl.program_id(0) * BLOCK, written, tl.num_programs(0) * BLOCK):
        start = first % read
        words = tl.load(source + start + within, start + within < read, other=0)
        tl.store(target + first + within, words, first + within < written)
    while _now() < until:
        pass


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
