"""CAAT-Net's ablation: small Llamas trained on four ranks, which add up 16 bits in float32, or in 16 bits.

    .venv/bin/python studies/accumulation.py    # all that results/from-scratch lacks; an hour, resumable

Sizes, rows and held-out windows are from_scratch.py's. Both send 16 bits. The paper (v1) finds float32 needed where
gradients are summed after the norms' derivatives, as ours are.
"""

from __future__ import annotations

import json
import os
import shutil
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from accelerate.parallelism_config import ParallelismConfig
from adapt_smollm2 import as_flags
from from_scratch import MADE, RESULT, SEEDS, SHARDS, SUMS, TRAINING, page, prepare, validation_loss
from quality import append, read
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rewired.adapt.recipe import checks, reading
from rewired.adapt.run import adapt
from rewired.model import reductions
from rewired.ranks import run_on_ranks

STEPS = 300


def main() -> None:
    logging.disable_progress_bar()
    prepare()
    windows = torch.stack([torch.tensor(ids) for ids in json.loads((MADE / "held_out.json").read_text())])
    for seed in SEEDS:
        for bits in (32, 16):
            if (bits, seed) not in {(row["bits"], row["seed"]) for row in read(SUMS)}:
                append(SUMS, {"bits": bits, "seed": seed} | train(bits, seed, windows))
                RESULT.with_name("README.md").write_text(page(read(RESULT), read(SUMS)))


def train(bits: int, seed: int, windows: torch.Tensor) -> dict[str, Any]:
    """Train one model whose ranks add up in so many bits, and judge it alone. A run that was killed goes on."""
    out = MADE / f"sums-{bits}-{seed}"
    keys = {
        "wiring": "standard",
        "seed": seed,
        "output_dir": str(out),
        "max_steps": STEPS,
        "tp_size": SHARDS,
        "bf16": True,
    }
    (final,) = set(run_on_ranks(train_on_rank, SHARDS, TRAINING | keys, bits))
    logged = json.loads((final / "training.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(final).eval()
    shutil.rmtree(out)
    return {
        "loss": validation_loss(model, windows),
        "last_training_loss": mean([entry["loss"] for entry in logged if "loss" in entry][-5:]),
        "steps": STEPS,
    }


def train_on_rank(keys: dict[str, Any], bits: int) -> Any:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # accelerate asks for them, though nobody listens there
    start = reductions.start_wide_sum if bits == 32 else reductions.start_all_reduce
    with (
        patch.object(ParallelismConfig, "_validate_accelerator", lambda *_: None),  # refuses CPUs, as does the next
        patch.object(checks, "check_devices", lambda *_: None),
        patch.object(reductions, "start_wide_sum", start),
    ):
        return adapt(reading.read(MADE / "recipe.yaml", as_flags(keys)), resume=True)


if __name__ == "__main__":
    main()
