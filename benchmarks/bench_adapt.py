"""A training step of `adapt` against one of TRL's SFTTrainer on stock Llama, on the same rows.

    .venv/bin/python benchmarks/bench_adapt.py

SmolLM2-135M-Instruct on the CPU, rows of 512 tokens of the packaged mix, forward, backward and AdamW. Two trainings at
a time are timed in turns (A B, B A, A B, ...), and the figure is the median of the pairs' ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from page import parser, show
from trainings import Step, Trainings
from transformers import AutoTokenizer
from transformers.utils import logging
from turns import Seconds, faster, in_turns

from rewired.refit.calibration import load
from rewired.sources import checkpoint_folder
from rewired.tables import markdown

ROWS, BATCH = 16, 2
LADDER = ("ladder", "15-")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=8)
    args = made.parse_args()
    logging.disable_progress_bar()
    source = checkpoint_folder("smollm2-135m")
    rows = load("mix", AutoTokenizer.from_pretrained(source), ROWS * 512).windows.tolist()
    with TemporaryDirectory() as scratch:
        cells = [
            _row(name, against, in_turns({"base": base(), "other": other()}, args.rounds, name))
            for (name, against), (base, other) in pairs(Trainings(source, rows, BATCH, "cpu", Path(scratch))).items()
        ]
    headings = ["training", "against", "ms: the other's, its own", "speed, of the other's", "time, of the other's"]
    show(markdown(headings, cells), "torch", "transformers", "trl")


def pairs(trainings: Trainings) -> dict[tuple[str, str], tuple[Callable[[], Step], Callable[[], Step]]]:
    """What is timed, and against what."""
    found = {
        (f"SFT, {name}, all", "TRL on stock Llama"): (trainings.stock, partial(trainings.sft, *wiring))
        for name, wiring in (("standard", ("standard", "0-")), ("ladder 15-30", LADDER))
    }
    for train in ("rewired", "all"):
        both = partial(trainings.sft, *LADDER, train), partial(trainings.distillation, *LADDER, train)
        found[f"distillation, ladder 15-30, {train}", f"SFT, {train}"] = both
    return found


def _row(name: str, against: str, seconds: Seconds) -> list[str]:
    base, other = seconds.values()
    times = f"{1e3 * median(base):.0f}, {1e3 * median(other):.0f}"
    return [name, against, times, faster(base, other), faster(other, base)]


if __name__ == "__main__":
    main()
