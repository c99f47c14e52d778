"""Prefill and decode of each wiring against stock Llama, as `rewired bench` times them, and against memory's speed.

Batch 1. To decode a token a model reads all weights, but for those of an embedding that is not the head, and the cache:
no model can be faster than those bytes over the measured bandwidth of a copy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from part import parser, progress, write

from rewired.bench.report import READING, tables, verdicts
from rewired.bench.request import BenchRequest
from rewired.bench.run import bench
from rewired.bench.timing import timed
from rewired.checkpoint.named_shapes import named_shapes
from rewired.checkpoint.shape import Shape, cache_bytes, weight_bytes
from rewired.tables import markdown

ITEM = 2  # bytes of a bfloat16
GOAL = 0.85  # of the bound, for compiled decoding


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", choices=list(named_shapes()))
    made.add_argument("--wirings", nargs="+", required=True, help="beside stock and standard")
    made.add_argument("--prompt", type=int, default=2048, help="tokens of a prefill (default 2048)")
    made.add_argument("--new", type=int, default=32, help="tokens decoded in one timed run (default 32)")
    made.add_argument("--rounds", type=int, default=7, help="(default 7)")
    made.add_argument("--layers", type=int, help="of the model; by default all")
    args = made.parse_args()
    shape = named_shapes()[args.model]
    shape = replace(shape, num_hidden_layers=args.layers or shape.num_hidden_layers)
    bandwidth = copy_bandwidth(args.device)
    if args.device == "cuda":
        torch.cuda.empty_cache()  # the ranks of the bench are other processes
    size = bytes_per_token(shape, args.prompt, args.new)
    progress(f"a copy moves {bandwidth / 1e12:.3f} TB/s, read and written")
    request = BenchRequest(
        args.model, tuple(args.wirings), args.prompt, args.new, args.layers, args.rounds, device=args.device
    )
    with TemporaryDirectory(prefix="rewired-speed-") as scratch:
        results = bench(request, [1], [1], Path(scratch))
    shares = {row["wiring"]: size / bandwidth / row["decode_compiled_seconds"] for row in results["rows"]}
    bounds = [f"{name}, compiled, of the bound: {share:.0%} (goal {GOAL:.0%})" for name, share in shares.items()]
    text = TEXT.format(
        args=args,
        layers=shape.num_hidden_layers,
        size=size / 1e9,
        bandwidth=bandwidth / 1e12,
        bound=1e3 * size / bandwidth,
    )
    measured = [markdown(table.headings, table.rows) for table in tables(results)]
    lines = "\n".join(f"- {line}" for line in [*verdicts(results), *bounds])
    write(args.section, f"## Speed, {args.model}", f"{text} {READING}", *measured, lines)


def bytes_per_token(shape: Shape, prompt: int, new: int) -> float:
    """Weights and cache, midway through the decoding. One row of an embedding is nothing."""
    embedding = 0 if shape.tie_word_embeddings else ITEM * shape.head_weights
    return weight_bytes(shape, 1) - embedding + cache_bytes(shape, 1, prompt + new // 2)


def copy_bandwidth(device: str) -> float:
    """Bytes per second that a large copy reads and writes, the median of some."""
    size = (1 << 31) if device == "cuda" else (1 << 27)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copy()
    return 2 * size / median(timed(copy) for _ in range(20))


TEXT = """{layers} layers, batch 1, a prompt of {args.prompt} tokens, {args.new} new ones, {args.rounds} rounds, random
bfloat16 weights. A token takes {size:.2f} GB of weights and cache, and a copy moves {bandwidth:.3f} TB/s: no token can
take less than {bound:.3g} ms, the bound."""

if __name__ == "__main__":
    main()
