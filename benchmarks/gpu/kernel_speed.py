"""Kernels against a copy of as many bytes, both in turns: those of a payload, and those of a training's `comm`.

A payload as one of eight ranks has it in a prefill: it packs its part, adds up an eighth of all ranks' rows, unpacks
the sum. A layer's weights and gradients as two nodes of eight ranks send them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from part import parser, progress, write

from benchmarks.turns import in_turns
from rewired.comm import packing
from rewired.comm.packing import Layout, Packing
from rewired.model import kernels
from rewired.model.payload import Section
from rewired.model.quantised_reduction import _add_up, _pack, _unpack
from rewired.tables import markdown

RANKS = 8
ROUNDS = 15
GOAL = 0.7  # of a copy's bandwidth
HEADINGS = ("step", "bits", "MB", "ms", "of a copy's bandwidth", "ms, eager")

Run = Callable[[], Any]
Step = tuple[str, Run, Sequence[torch.Tensor]]  # what it does, and what it reads


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=4096, help="(default 4096)")
    made.add_argument("--hidden", type=int, default=8192, help="channels of a payload (default 8192)")
    made.add_argument("--weights", type=int, default=1 << 27, help="numbers of a layer (default 2^27)")
    args = made.parse_args()
    rows = []
    for bits in (8, 4):
        for name, run, read in [*payload_steps(args, bits), *comm_steps(args, bits)]:
            rows.append([name, str(bits), *measured(run, read, args.device)])
            progress(" ".join(rows[-1]))
            text = TEXT.format(args=args, goal=GOAL)
            write(args.section, "## Kernels of what is quantised", text, markdown(HEADINGS, rows))


def payload_steps(args: Any, bits: int) -> Iterator[Step]:
    sections = (Section(bits, bits, args.hidden),)
    part = torch.randn(1, args.tokens, args.hidden, device=args.device, dtype=torch.bfloat16)
    yield "payload: quantise, pack for ranks", lambda: _pack(part, sections=sections, ranks=RANKS), [part]
    sent, _ = _pack(part, sections=sections, ranks=RANKS)
    received, left = sent[:, 0].contiguous(), torch.empty_like(part)

    def add_up() -> list[torch.Tensor]:
        return [_add_up(received, left, sections=sections, ranks=RANKS, rank=0), left]

    yield "payload: unpack, add up, quantise, pack", add_up, [received]
    gathered, total = add_up()[0].expand(RANKS, -1, -1).contiguous(), torch.empty_like(part)

    def unpack() -> list[torch.Tensor]:
        _unpack(gathered, total, sections=sections)
        return [total]

    yield "payload: unpack", unpack, [gathered]


def comm_steps(args: Any, bits: int) -> Iterator[Step]:
    layout = Layout((args.weights // RANKS,), (True,))  # of a shard
    packing_ = Packing(f"int{bits}", layout)
    shard = torch.randn(args.weights // RANKS, device=args.device)
    yield "comm: quantise weights", lambda: packing.pack_shard(shard, packing=packing_), [shard]
    packed = packing.pack_shard(shard, packing=packing_).expand(RANKS, -1).contiguous()
    bf16 = torch.bfloat16
    yield "comm: unpack weights", lambda: packing.unpack_shards(packed, packing=packing_, dtype=bf16), [packed]
    slices = torch.randn(2, RANKS, args.weights // RANKS // 2, device=args.device, dtype=bf16)
    rotation = packing.hadamard(slices.device)
    half = Layout((args.weights // RANKS // 2,), (True,))
    yield (
        "comm: reorder and rotate gradients",
        lambda: packing.split_slices(slices, rotation, layout=half),
        [slices],
    )
    parts, halves = packing.split_slices(slices, rotation, layout=half), Packing(f"int{bits}", half)
    yield "comm: quantise gradients", lambda: packing.pack_parts(*parts, packing=halves), parts
    sent = packing.pack_parts(*parts, packing=halves)
    yield "comm: unpack and add up gradients", lambda: packing.add_up(sent, packing=halves), [sent]


def measured(run: Run, read: Sequence[torch.Tensor], device: str) -> list[str]:
    """Cells, of medians of interleaved rounds: the kernel, a copy of as many bytes, the function in eager mode."""
    found = run()
    found = [found] if isinstance(found, torch.Tensor) else found
    size = sum(tensor.nbytes for tensor in [*read, *found])
    source = torch.randint(256, (size // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def eager() -> None:
        devices, kernels._DEVICES = kernels._DEVICES, set()
        try:
            run()
        finally:
            kernels._DEVICES = devices

    times = in_turns({"kernel": run, "copy": partial(target.copy_, source), "eager": eager}, ROUNDS)
    share = median(copy / kernel for copy, kernel in zip(times["copy"], times["kernel"], strict=True))
    kernel, plain = (1e3 * median(times[name]) for name in ("kernel", "eager"))
    return [f"{size / 1e6:.1f}", f"{kernel:.3g}", f"{share:.0%}", f"{plain:.3g}"]


TEXT = """A payload of {args.tokens:,} tokens of {args.hidden:,} channels in bfloat16 on one of eight ranks; a layer of
{args.weights:,} weights on one of two nodes' sixteen. MB are what goes in and comes out, and a copy is of as many;
medians, and that of the rounds' own ratios, all three in turns. The goal is {goal:.0%} of a copy's bandwidth."""

if __name__ == "__main__":
    main()
