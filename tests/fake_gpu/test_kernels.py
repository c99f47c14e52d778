"""Every kernel, compiled for each generation of GPUs: so many launches, no spilled register, nothing but launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rewired.bench.hold_kernel import WARPS, WORDS_AT_ONCE, _hold
from rewired.comm import packing
from rewired.comm.packing import BITS, Layout, Packing
from rewired.model.payload import FORMATS, GROUP, Section
from rewired.model.quantisation import quantised_sum
from rewired.model.quantised_reduction import _add_up, _pack, _unpack
from rewired.ranks import run_on_ranks

from .conftest import Report
from .device import TARGETS, Program, compiled, measured, pretend

RANKS, TOKENS, CHANNELS = 8, 512, 8192
NODES, NUMBERS = 2, 1 << 20
PASSES = ("unpack shards", "split slices", "join parts", "split rotated", "join rotated")
LAUNCHES = {
    **{f"{name}, int{bits}": n for bits in FORMATS for name, n in (("pack", 2), ("unpack", 1), ("one process", 7))},
    **{"add up, int8": 3, "add up, int6": 4, "add up, int4": 5},
    **{"pack a shard, comm int8": 2, "pack parts, comm int8": 2, "add parts up, comm int8": 1},
    **{"pack a shard, comm int4": 3, "pack parts, comm int4": 3, "add parts up, comm int4": 2},
    **{f"{name}, comm {dtype}": 1 for dtype in BITS for name in PASSES},
}


def test_of_each_generation(report: Report) -> None:
    (found,) = run_on_ranks(programs, 1)
    for name, program in found.items():
        report.add("kernels", name, len(program.launches), *(registers(program, target) for target in TARGETS))
        assert {cubin.target for cubin in program.cubins} == set(TARGETS), name
        assert set(spilled(program).values()) == {0}, name
        assert [line for line in program.call if is_no_launch(line)] == [], name
    assert {name: len(program.launches) for name, program in found.items()} == LAUNCHES


def test_the_stand_in_for_a_collective(report: Report) -> None:
    """Triton's own kernel, which needs no Inductor."""
    signature = {"source": "*bf16", "read": "i64", "target": "*bf16", "written": "i64", "nanoseconds": "i64"}
    signature |= {"per_mille": "*i64", "BLOCK": "constexpr"}
    source = ASTSource(_hold, signature, {"BLOCK": WORDS_AT_ONCE})
    for target in TARGETS:
        kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": WARPS})
        cubin = measured(kernel, "hold", target)
        assert cubin.spilled == 0
        assert "%globaltimer" in kernel.asm["ptx"]
        report.add("stand-in", target, cubin.registers)


def spilled(program: Program) -> dict[tuple[str, int], int]:
    """Of each kernel, by the best of the ways among which the autotuner chooses."""
    found: dict[tuple[str, int], int] = {}
    for cubin in program.cubins:
        key = cubin.kernel, cubin.target
        found[key] = min(cubin.spilled, found.get(key, cubin.spilled))
    return found


def registers(program: Program, target: int) -> int:
    """Of a thread, the most that a kernel takes that spills none."""
    return max(cubin.registers for cubin in program.cubins if cubin.target == target and not cubin.spilled)


def is_no_launch(line: str) -> bool:
    """A kernel of C++, a copy between devices, or an operation that Inductor has made no kernel of.

    A product is the library's, and another view of the same bytes costs nothing.
    """
    if line.startswith(("#", "assert")) or "aten.view.dtype(" in line or "extern_kernels.mm(" in line:
        return False
    return any(part in line for part in ("cpp_fused", "_cpu(", "torch.ops.", "aten.", "extern_kernels."))


def programs() -> dict[str, Program]:
    pretend()
    return {name: compiled(work) for name, work in kernels().items()}


def kernels() -> dict[str, Callable[[], Any]]:
    works: dict[str, Callable[[], Any]] = {}
    for bits in FORMATS:
        sections = (Section(bits, bits, CHANNELS),)
        works |= {f"{name}, int{bits}": work for name, work in of_payload(sections).items()}
    for dtype in BITS:
        works |= {f"{name}, comm {dtype}": work for name, work in of_training(dtype).items()}
    return works


def of_payload(sections: tuple[Section, ...]) -> dict[str, Callable[[], Any]]:
    rank_bytes = CHANNELS // GROUP // RANKS * FORMATS[sections[0].bits].group_bytes()
    rows = partial(empty, RANKS, TOKENS, rank_bytes, dtype=torch.uint8)
    parts = partial(empty, 1, TOKENS, CHANNELS, dtype=torch.bfloat16)
    return {
        "pack": lambda: _pack(parts(), sections=sections, ranks=RANKS),
        "add up": lambda: _add_up(rows(), parts(), sections=sections, ranks=RANKS, rank=0),
        "unpack": lambda: _unpack(rows(), parts(), sections=sections),
        "one process": lambda: quantised_sum(empty(RANKS, 1, TOKENS, CHANNELS, dtype=torch.bfloat16), sections),
    }


def of_training(dtype: str) -> dict[str, Callable[[], Any]]:
    layout = Layout((NUMBERS,), (True,))
    packed = Packing(dtype, layout)
    size = NUMBERS // packing.BLOCK * FORMATS[BITS[dtype]].group_bytes(packing.BLOCK)
    blocks = partial(empty, NUMBERS // packing.BLOCK, packing.BLOCK)
    rotation = partial(empty, packing.BLOCK, packing.BLOCK)
    return {
        "pack a shard": lambda: packing.pack_shard(empty(NUMBERS), packing=packed),
        "unpack shards": lambda: packing.unpack_shards(
            empty(RANKS, size, dtype=torch.uint8), packing=packed, dtype=torch.bfloat16
        ),
        "split slices": lambda: packing.split_slices(empty(NODES, RANKS, NUMBERS, dtype=torch.bfloat16), layout=layout),
        "pack parts": lambda: packing.pack_parts(blocks(), empty(0), packing=packed),
        "add parts up": lambda: packing.add_up(empty(RANKS, size, dtype=torch.uint8), packing=packed),
        "join parts": lambda: packing.join_parts(blocks(), empty(0), layout=layout, factor=0.25),
        "split rotated": lambda: packing.split_slices(
            empty(NODES, RANKS, NUMBERS, dtype=torch.bfloat16), rotation(), layout=layout
        ),
        "join rotated": lambda: packing.join_parts(blocks(), empty(0), rotation(), layout=layout, factor=0.25),
    }


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")
