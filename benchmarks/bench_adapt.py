"""A training step of `adapt` against one of TRL's SFTTrainer on stock Llama, on the same rows.

    .venv/bin/python benchmarks/bench_adapt.py --write

SmolLM2-135M-Instruct, rows of 512 tokens of the packaged mix, forward, backward and AdamW. Two trainings at a time are
timed in turns (A B, B A, A B, ...), and the figure is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from paired import Pairs, interleaved, milliseconds, speed
from training_step import step_of
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

import rewired  # noqa: F401 - registers the rewired classes
from rewired.adapt.losses.distillation import add_losses
from rewired.adapt.losses.token_loss import TokenLoss
from rewired.adapt.model.teacher import beside
from rewired.adapt.model.trainable import choose, rewired_layers
from rewired.adapt.trainer.trainer import AdaptTrainer
from rewired.convert import Request, convert
from rewired.refit.calibration import load

RESULT = Path(__file__).resolve().parents[1] / "results" / "bench-adapt.md"
MODEL = "smollm2-135m"
ROWS, BATCH = 16, 2
STANDARD, LADDER = (
    [{"layers": layers, "preset": preset}] for layers, preset in (("0-", "standard"), ("15-", "ladder"))
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULT.name}")
    args = parser.parse_args()
    logging.disable_progress_bar()
    average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wired = {name: convert(MODEL, folder / name, Request(w)).out for name, w in (("s", STANDARD), ("l", LADDER))}
        steps = Steps(wired, folder)
        rows = [
            _row(f"SFT, {name}, {train}", "TRL on stock Llama", interleaved(base, other, args.pairs))
            for name, train, base, other in (
                ("standard", "all", steps.stock(), steps.ours("s", "all")),
                ("ladder 15-30", "all", steps.stock(), steps.ours("l", "all")),
            )
        ]
        rows += [
            _row(f"distillation, ladder 15-30, {train}", f"SFT, {train}", interleaved(base, other, args.pairs))
            for train, base, other in (
                (train, steps.ours("l", train), steps.ours("l", train, distills=True)) for train in ("rewired", "all")
            )
        ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    report = _REPORT.format(
        command=shlex.join(["benchmarks/bench_adapt.py", *sys.argv[1:]]),
        environment=f"{date.today()}; {device}, {torch.get_num_threads()} threads, load average {average:.2f} before",
        versions=", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl")),
        batch=BATCH,
        pairs=args.pairs,
        rows="\n".join(rows),
    )
    print(report)
    if args.write:
        RESULT.write_text(report)


class Steps:
    """Trainings of which one step can be run."""

    def __init__(self, wired: dict[str, Path], folder: Path) -> None:
        self.wired, self.folder = wired, folder
        self.tokenizer = AutoTokenizer.from_pretrained(wired["s"])
        windows = load("mix", self.tokenizer, ROWS * 512).windows.tolist()
        self.rows = Dataset.from_dict({"input_ids": windows, "labels": windows})

    def stock(self) -> Callable[[], None]:
        """TRL's, on transformers' Llama."""
        state = AutoModelForCausalLM.from_pretrained(self.wired["s"], dtype=torch.float32)
        model = LlamaForCausalLM(_dense(state.config))
        model.load_state_dict(state.state_dict())
        return step_of(SFTTrainer(model, self._arguments(), train_dataset=self.rows, processing_class=self.tokenizer))

    def ours(self, name: str, train: str, distills: bool = False) -> Callable[[], None]:
        model: Any = AutoModelForCausalLM.from_pretrained(self.wired[name], dtype=torch.float32)
        choose(model, train)
        trainer = AdaptTrainer(
            model,
            self._arguments(),
            train_dataset=self.rows,
            processing_class=self.tokenizer,
            losses=["ce", "kd"] if distills else [],
        )
        if distills:
            teacher = beside(model, self.wired[name])
            add_losses(model, teacher, TokenLoss(ce=0, kd=1), 0.0, rewired_layers(model.config))
        return step_of(trainer)

    def _arguments(self) -> SFTConfig:
        return SFTConfig(
            output_dir=str(self.folder / "out"),
            per_device_train_batch_size=BATCH,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            activation_checkpointing=False,
            max_length=None,
        )


def _dense(config: Any) -> Any:
    from transformers import LlamaConfig

    ours = ("model_type", "wiring", "wiring_version", "tp_shards", "auto_map", "architectures", "pretraining_tp")
    return LlamaConfig(**{name: value for name, value in config.to_dict().items() if name not in ours})


def _row(name: str, base: str, pairs: Pairs) -> str:
    print(name, base, speed(pairs), flush=True)
    return f"| {name} | {base} | {milliseconds(pairs)} | {speed(pairs)} | {speed([pair[::-1] for pair in pairs])} |"


_REPORT = """# A training step: `adapt` against TRL

`python {command}`, {environment}; {versions}.

SmolLM2-135M-Instruct in float32, {batch} rows of 512 tokens: forward, backward, AdamW. Medians of {pairs} interleaved
pairs, and their quartiles.

| training | against | ms: the other's, its own | speed, of the other's | time, of the other's |
|---|---|---|---|---|
{rows}
"""

if __name__ == "__main__":
    main()
