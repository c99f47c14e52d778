"""Tokens per second of a training step, SFT and distillation, against TRL's SFT.

Random weights, rows of random tokens; forward, backward and AdamW. The trainings run one after another, since two do
not always fit into memory together; TRL's runs once more near the end.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from part import parser, progress, random_checkpoint, random_tokens, write
from transformers.utils import logging

from benchmarks.trainings import Step, Trainings
from rewired.bench.timing import timed
from rewired.checkpoint.named_shapes import named_shapes
from rewired.tables import markdown

WARM_UP = 3
BATCHES = 4  # of different rows, in turns
STOCK = "SFT, stock Llama, TRL"
HEADINGS = ("training", "tokens/s", "peak GB")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", choices=list(named_shapes()))
    made.add_argument("--rows", type=int, default=4, help="of a batch (default 4)")
    made.add_argument("--length", type=int, default=1024, help="tokens of a row (default 1024)")
    made.add_argument("--steps", type=int, default=12, help="that are timed (default 12)")
    args = made.parse_args()
    logging.disable_progress_bar()
    rows, failed = [], False
    with TemporaryDirectory(prefix="rewired-training-") as folder:
        for name, make in trainings(args, Path(folder)).items():
            try:
                measured = measure(make(), args)
            except Exception as error:  # the others go on
                traceback.print_exc()
                failed, measured = True, [f"failed: {type(error).__name__}: {error}".splitlines()[0], ""]
            rows.append([name, *measured])
            write(args.section, f"## Training, {args.model}", TEXT.format(args=args), markdown(HEADINGS, rows))
            progress(" ".join(rows[-1]))
            release()
    sys.exit(failed)


def measure(step: Step, args: Any) -> list[str]:
    """Cells: tokens per second with their quartiles, and the peak of memory."""
    for _ in range(WARM_UP):
        step()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step) for _ in range(args.steps)]
    low, middle, high = (args.rows * args.length / each for each in quantiles(seconds, n=4, method="inclusive")[::-1])
    memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if args.device == "cuda" else ""
    return [f"{middle:,.0f} ({low:,.0f} to {high:,.0f})", memory]


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trainings(args: Any, folder: Path) -> dict[str, Callable[[], Step]]:
    source = random_checkpoint(args.model, folder / "model", args.device)
    rows = random_tokens(args.model, BATCHES * args.rows, args.length)
    progress("the model is written")
    ours = Trainings(source, rows, args.rows, args.device, folder)
    ladder = ("ladder", f"{named_shapes()[args.model].num_hidden_layers // 2}-")
    return {
        STOCK: ours.stock,
        "SFT, standard, adapt": partial(ours.sft, "standard", "0-"),
        "SFT, ladder of the upper half, adapt": partial(ours.sft, *ladder),
        "distillation, all weights": partial(ours.distillation, *ladder, "all"),
        "distillation, rewired layers": partial(ours.distillation, *ladder, "rewired"),
        f"{STOCK}, again": ours.stock,
    }


TEXT = """Random float32 weights, on GPUs under bfloat16 autocast; {args.rows} rows of {args.length} tokens a step:
forward, backward, AdamW; the median of {args.steps} steps and its quartiles."""

if __name__ == "__main__":
    main()
