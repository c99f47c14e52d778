"""The damage of each wiring to a real model right after conversion: perplexity on the packaged page of prose.

.venv/bin/python studies/conversion_damage.py --write
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import rewired  # noqa: F401 - registers the rewired classes
from rewired.convert import Request, convert

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "results" / "smollm2-conversion.md"
WINDOWS, LENGTH = 4, 512

WIRINGS: list[tuple[str, dict[str, Any]]] = [
    ("original", {"layers": "0-", "preset": "standard"}),
    ("ladder", {"layers": "15-30", "preset": "ladder"}),
    ("ladder", {"layers": "10-30", "preset": "ladder"}),
    ("ladder", {"layers": "0-30", "preset": "ladder"}),
    ("ladder + peek", {"layers": "15-30", "preset": "ladder", "peek": True}),
    ("ladder + peek", {"layers": "10-30", "preset": "ladder", "peek": True}),
    ("ladder + peek", {"layers": "0-30", "preset": "ladder", "peek": True}),
    ("desync-2x, merge sum", {"layers": "15-30", "preset": "desync"}),
    ("desync-2x, merge mean", {"layers": "15-30", "preset": "desync", "merge": "mean"}),
    ("desync-4x, merge sum", {"layers": "15-30", "preset": "desync", "every": 4}),
    ("desync-4x, merge mean", {"layers": "15-30", "preset": "desync", "every": 4, "merge": "mean"}),
    ("parallel", {"layers": "15-30", "preset": "parallel"}),
    ("partial 0.75", {"layers": "15-30", "preset": "partial", "shared_fraction": 0.75}),
    (
        "partial 0.75, gain sqrt(r)",
        {"layers": "15-30", "preset": "partial", "shared_fraction": 0.75, "initial_gain": "sqrt_shards"},
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    lines = ["| layers | wiring | perplexity | over the original's |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="rewired-damage-") as scratch:
        folder = Path(scratch)
        dense = Request([{"layers": "0-", "preset": "standard"}], dtype="float32")
        source = convert("smollm2-135m", folder / "source", dense).out
        original = 0.0
        for number, (name, entry) in enumerate(WIRINGS):
            rewired_perplexity = perplexity(convert(source, folder / str(number), Request([entry])).out)
            original = original or rewired_perplexity
            ratio = rewired_perplexity / original
            lines.append(f"| {entry['layers']} | {name} | {rewired_perplexity:.1f} | {ratio:.3f} |")
            print(lines[-1], flush=True)
    if arguments.write:
        RESULT.write_text(_HEAD.format(command=shlex.join(["python", *sys.argv])) + "\n".join(lines) + "\n")


def perplexity(path: Path) -> float:
    """On the first WINDOWS x LENGTH tokens of evaluate/texts/prose.txt, each window on its own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prose = (ROOT / "evaluate" / "texts" / "prose.txt").read_text()
    input_ids = AutoTokenizer.from_pretrained(path)(prose, return_tensors="pt").input_ids[:, : WINDOWS * LENGTH]
    with torch.no_grad():
        losses = [model(window, labels=window).loss.item() for window in input_ids.view(WINDOWS, 1, LENGTH)]
    return math.exp(sum(losses) / WINDOWS)


_HEAD = """# SmolLM2-135M-Instruct right after conversion

No weight was changed. 30 layers, `tp_shards` 3, float32, 4 windows of 512 tokens of `evaluate/texts/prose.txt`. The
weights are dequantised from the Q4_1 GGUF file that `convert smollm2-135m` takes where there is no hub.

    {command}

"""

if __name__ == "__main__":
    main()
