"""Prefill and decode of each wiring against stock Llama, as `rewired bench` times them, and against memory's speed.

Batch 1. To decode a token a model reads all weights, but for those of an embedding that is not the head, and the cache:
no model can be faster than those bytes over the measured bandwidth of a copy.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from part import parser, progress, save

from rewired.bench.request import BenchRequest
from rewired.bench.run import bench
from rewired.checkpoint.memory import cache_bytes, weight_bytes
from rewired.checkpoint.named_shapes import named_shapes
from rewired.checkpoint.shape import Shape

ITEM = 2  # bytes of a bfloat16


def main() -> None:
    args = arguments()
    shape = named_shapes()[args.model]
    data: dict[str, Any] = {"model": args.model, "prompt": args.prompt, "new": args.new, "rounds": args.rounds}
    data["bandwidth"] = copy_bandwidth(args.device)
    data["bytes_per_token"] = bytes_per_token(shape, args.prompt, args.new)
    progress(f"a copy moves {data['bandwidth'] / 1e12:.3f} TB/s, read and written")
    request = BenchRequest(
        args.model, tuple(args.wirings), prompt=args.prompt, new=args.new, rounds=args.rounds, device=args.device
    )
    with TemporaryDirectory(prefix="rewired-speed-") as scratch:
        data["rows"] = bench(request, [1], [1], Path(scratch))["rows"]
    save(data, args.data)


def arguments() -> Any:
    made = parser(__doc__)
    made.add_argument("model", choices=list(named_shapes()))
    made.add_argument("--wirings", nargs="+", required=True, help="beside stock and standard")
    made.add_argument("--prompt", type=int, default=2048, help="tokens of a prefill (default 2048)")
    made.add_argument("--new", type=int, default=32, help="tokens decoded in one timed run (default 32)")
    made.add_argument("--rounds", type=int, default=7, help="(default 7)")
    return made.parse_args()


def bytes_per_token(shape: Shape, prompt: int, new: int) -> float:
    """Weights and cache, midway through the decoding. One row of an embedding is nothing."""
    embedding = 0 if shape.tie_word_embeddings else ITEM * shape.head_weights
    return weight_bytes(shape, 1) - embedding + cache_bytes(shape, 1, prompt + new // 2)


def copy_bandwidth(device: str, repeats: int = 20) -> float:
    """Bytes per second that a large copy reads and writes, the median of some."""
    size = (1 << 31) if device == "cuda" else (1 << 27)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(repeats):
        settle(device)
        started = time.perf_counter()
        target.copy_(source)
        settle(device)
        times.append(time.perf_counter() - started)
    del source, target
    if device == "cuda":
        torch.cuda.empty_cache()  # the ranks of the bench are other processes
    return 2 * size / median(times)


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
