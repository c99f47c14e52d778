"""The kernels of a quantised reduction against memory's speed, and against the functions that they are compiled from.

As one of eight ranks has them in a prefill: it packs its part, adds up an eighth of all ranks' rows, unpacks the sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from part import parser, progress, save
from speed import copy_bandwidth, settle

from rewired.model.kernels import compiled
from rewired.model.quantisation import add_up, pack_parts, unpack_sum

RANKS = 8

Step = tuple[str, Callable[..., Any], tuple[Any, ...]]  # what it does, the function, its arguments


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=4096)
    made.add_argument("--hidden", type=int, default=8192)
    args = made.parse_args()
    data: dict[str, Any] = {"tokens": args.tokens, "hidden": args.hidden, "rows": []}
    data["bandwidth"] = copy_bandwidth(args.device)
    part = torch.randn(1, args.tokens, args.hidden, device=args.device, dtype=torch.bfloat16)
    for bits in (8, 4):
        for name, function, arguments in steps(part, bits):
            eager = function(*arguments)
            kernel = compiled(function)
            same = [torch.equal(found, wanted) for found, wanted in pairs(kernel(*arguments), eager)]
            size = sum(tensor.nbytes for tensor in (*tensors(arguments), *tensors(eager)))
            seconds = [timed(lambda run=run, given=arguments: run(*given), args.device) for run in (kernel, function)]
            data["rows"].append({"step": name, "bits": bits, "bytes": size, "seconds": seconds, "same": all(same)})
            progress(f"{name}, {bits} bits: {size / seconds[0] / data['bandwidth']:.0%} of a copy's bandwidth")
            save(data, args.data)


def steps(part: torch.Tensor, bits: int) -> Iterator[Step]:
    rows, _ = pack_parts(part, bits)  # [1, tokens, G, n]
    share = rows[:, :, : rows.shape[2] // RANKS].expand(RANKS, -1, -1, -1).contiguous()
    yield "quantise and pack", pack_parts, (part, bits)
    yield "unpack, add up, quantise and pack", add_up, (share, bits, bits, torch.float32)
    yield "unpack", unpack_sum, (rows[0], bits, part.shape[-1], part.dtype)


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in (values if isinstance(values, tuple) else (values,)) if isinstance(value, torch.Tensor)]


def pairs(found: Any, wanted: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(tensors(found), tensors(wanted), strict=True)


def timed(run: Callable[[], object], device: str, repeats: int = 20) -> float:
    """The median of some runs, in seconds."""
    run()
    times = []
    for _ in range(repeats):
        settle(device)
        started = time.perf_counter()
        run()
        settle(device)
        times.append(time.perf_counter() - started)
    return median(times)


if __name__ == "__main__":
    main()
