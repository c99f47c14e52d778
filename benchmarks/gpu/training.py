"""Tokens per second of a training step, SFT and distillation, with and without liger-kernel, against TRL's SFT.

Random weights in float32, under bfloat16 autocast on a GPU; rows of random tokens; forward, backward and AdamW. The
trainings run one after another, since two do not always fit into memory together; TRL's runs once more near the end.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from part import parser, progress, random_checkpoint, random_tokens, save
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

import rewired  # noqa: F401 - registers the rewired classes
from benchmarks.training_step import Step, step_of
from rewired.adapt.losses import liger, token_loss
from rewired.adapt.losses.distillation import add_losses
from rewired.adapt.losses.token_loss import TokenLoss
from rewired.adapt.model.teacher import beside
from rewired.adapt.model.trainable import choose, rewired_layers
from rewired.adapt.trainer.trainer import AdaptTrainer
from rewired.checkpoint.named_shapes import named_shapes
from rewired.convert import Request, convert

WARM_UP = 3
BATCHES = 4  # of different rows, in turns


def main() -> None:
    args = arguments()
    logging.disable_progress_bar()
    data: dict[str, Any] = {"model": args.model, "rows_per_step": args.rows, "length": args.length, "steps": args.steps}
    data["rows"] = []
    with TemporaryDirectory(prefix="rewired-training-") as folder:
        trainings = Trainings(args, Path(folder))
        progress("the models are written")
        for name, make, uses_liger in trainings.all():
            data["rows"].append({"training": name, "liger": uses_liger} | tried(make, uses_liger, args))
            save(data, args.data)
            progress(str(data["rows"][-1]))
            release()
    sys.exit(any("failed" in row for row in data["rows"]))


def arguments() -> Any:
    made = parser(__doc__)
    made.add_argument("model", choices=list(named_shapes()))
    made.add_argument("--rows", type=int, default=4, help="of a batch (default 4)")
    made.add_argument("--length", type=int, default=1024, help="tokens of a row (default 1024)")
    made.add_argument("--steps", type=int, default=12, help="that are timed (default 12)")
    return made.parse_args()


def tried(make: Callable[[], Step], uses_liger: bool, args: Any) -> dict[str, Any]:
    """What is measured of a training, or why nothing is; the others go on."""
    why = liger.missing(torch.device(args.device)) if uses_liger else None
    if why:
        return {"skipped": why}
    try:
        return measure(make(), args)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def measure(step: Step, args: Any) -> dict[str, Any]:
    for _ in range(WARM_UP):
        step()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(args.steps):
        settle(args.device)
        started = time.perf_counter()
        step()
        settle(args.device)
        seconds.append(time.perf_counter() - started)
    tokens = args.rows * args.length
    slow, middle, fast = (tokens / value for value in reversed(quantiles(seconds, n=4, method="inclusive")))
    memory = {"peak_bytes": torch.cuda.max_memory_allocated()} if args.device == "cuda" else {}
    return {"tokens_per_second": middle, "quartiles": [slow, fast], **memory}


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class Trainings:
    """Trainings of which one step can be run, each made when its turn comes."""

    args: Any
    folder: Path

    def __post_init__(self) -> None:
        self.source = random_checkpoint(self.args.model, self.folder / "model", self.args.device)
        half = named_shapes()[self.args.model].num_hidden_layers // 2
        wirings = {"standard": "0-", "ladder": f"{half}-"}
        self.wired = {
            preset: convert(self.source, self.folder / preset, Request([{"layers": layers, "preset": preset}])).out
            for preset, layers in wirings.items()
        }
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)
        rows = random_tokens(self.args.model, BATCHES * self.args.rows, self.args.length)
        self.rows = Dataset.from_dict({"input_ids": rows, "labels": rows})

    def all(self) -> list[tuple[str, Callable[[], Step], bool]]:
        """Names, and whether liger-kernel takes part. Of our own trainings it does so in distillation only."""
        stock = "SFT, stock Llama, TRL"
        # last, since TRL's kernels replace functions of transformers for good; Triton's interpreter takes none of them
        fused = [(stock, lambda: self.stock(True), True)] if self.args.device == "cuda" else []
        return [
            (stock, self.stock, False),
            ("SFT, standard, adapt", lambda: self.sft("standard"), False),
            ("SFT, ladder of the upper half, adapt", lambda: self.sft("ladder"), False),
            ("distillation, all weights", lambda: self.distillation("all", token_loss.token_loss), False),
            ("distillation, all weights", lambda: self.distillation("all", liger.token_loss), True),
            ("distillation, rewired layers", lambda: self.distillation("rewired", token_loss.token_loss), False),
            ("distillation, rewired layers", lambda: self.distillation("rewired", liger.token_loss), True),
            (f"{stock}, again", self.stock, False),
            *fused,
        ]

    def stock(self, uses_liger: bool = False) -> Step:
        model = self.load(self.source)
        arguments = self.arguments(use_liger_kernel=uses_liger)
        return step_of(SFTTrainer(model, arguments, train_dataset=self.rows, processing_class=self.tokenizer))

    def sft(self, preset: str) -> Step:
        model = self.load(self.wired[preset])
        choose(model, "all")
        return step_of(AdaptTrainer(model, self.arguments(), train_dataset=self.rows, processing_class=self.tokenizer))

    def distillation(self, train: str, kernels: Callable[..., Any]) -> Step:
        """Of the ladder, by KL alone."""
        model = self.load(self.wired["ladder"])
        choose(model, train)
        trainer = AdaptTrainer(
            model, self.arguments(), train_dataset=self.rows, processing_class=self.tokenizer, losses=["ce", "kd"]
        )
        dtype = torch.bfloat16 if self.args.device == "cuda" else None
        teacher = beside(model, self.source, dtype=dtype)
        add_losses(model, teacher, TokenLoss(ce=0, kd=1), 0.0, rewired_layers(model.config), kernels)
        return step_of(trainer)

    def load(self, folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(self.args.device)

    def arguments(self, **options: Any) -> SFTConfig:
        is_gpu = self.args.device == "cuda"
        return SFTConfig(
            output_dir=str(self.folder / "out"),
            per_device_train_batch_size=self.args.rows,
            use_cpu=not is_gpu,
            bf16=is_gpu,
            activation_checkpointing=False,
            max_length=None,
            report_to="none",
            **options,
        )


if __name__ == "__main__":
    main()
