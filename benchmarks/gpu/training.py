"""Tokens per second of a training step, SFT and distillation, against TRL's SFT.

Random weights, rows of random tokens; forward, backward and AdamW. The trainings run one after another, since two do
not always fit into memory together; TRL's runs once more near the end.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from part import parser, progress, random_checkpoint, random_tokens, write
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

import rewired  # noqa: F401 - registers the rewired classes
from rewired.adapt.losses.distillation import add_losses
from rewired.adapt.losses.token_loss import TokenLoss
from rewired.adapt.model.teacher import beside
from rewired.adapt.model.trainable import choose, rewired_layers
from rewired.adapt.trainer.trainer import AdaptTrainer
from rewired.bench.timing import timed
from rewired.checkpoint.named_shapes import named_shapes
from rewired.convert import Request, convert
from rewired.ranks import free_memory
from rewired.tables import markdown

WARM_UP = 3
BATCHES = 4  # of different rows, in turns
STOCK = "SFT, stock Llama, TRL"
HEADINGS = ("training", "tokens/s", "peak GB")
Step = Callable[[], None]  # forward, backward, optimizer


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
            free_memory()
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


@dataclass(frozen=True)
class Trainings:
    """`source` is a stock Llama in a folder; weights are float32, on GPUs under bfloat16 autocast."""

    source: Path
    rows: list[list[int]]  # of tokens
    batch: int
    device: str
    folder: Path  # for what is written

    def stock(self) -> Step:
        """TRL's SFT of transformers' Llama."""
        return _step(SFTTrainer(self._load(self.source), self._arguments(), **self._data))

    def sft(self, preset: str, layers: str) -> Step:
        return _step(AdaptTrainer(self._student(preset, layers, "all"), self._arguments(), **self._data))

    def distillation(self, preset: str, layers: str, train: str) -> Step:
        """By KL alone, from the original."""
        model = self._student(preset, layers, train)
        trainer = AdaptTrainer(model, self._arguments(), losses=["ce", "kd"], **self._data)
        teacher = beside(model, self.source, dtype=torch.bfloat16 if self.device == "cuda" else None)
        add_losses(model, teacher, TokenLoss(ce=0, kd=1), 0.0, rewired_layers(model.config))
        return _step(trainer)

    def _student(self, preset: str, layers: str, train: str) -> Any:
        out = self.folder / f"{preset}-{layers}"
        if not out.exists():
            convert(self.source, out, Request([{"layers": layers, "preset": preset}]))
        model = self._load(out)
        choose(model, train)
        return model

    def _load(self, folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(self.device)

    @cached_property
    def _data(self) -> dict[str, Any]:
        rows = Dataset.from_dict({"input_ids": self.rows, "labels": self.rows})
        return {"train_dataset": rows, "processing_class": AutoTokenizer.from_pretrained(self.source)}

    def _arguments(self) -> SFTConfig:
        is_gpu = self.device == "cuda"
        return SFTConfig(
            output_dir=str(self.folder / "out"),
            per_device_train_batch_size=self.batch,
            use_cpu=not is_gpu,
            bf16=is_gpu,
            activation_checkpointing=False,
            max_length=None,
            report_to="none",
        )


def _step(trainer: Any) -> Step:
    """One step of a trainer as a function; batches take turns."""
    trainer.create_optimizer()
    batches = list(trainer.get_train_dataloader())
    model = trainer.accelerator.prepare_model(trainer.model).train()  # which is where autocast comes from

    def step() -> None:
        batch = batches[0]
        batches.append(batches.pop(0))
        count = (batch["labels"][:, 1:] != -100).sum()
        trainer.training_step(model, dict(batch), num_items_in_batch=count)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    return step


TEXT = """Random float32 weights, on GPUs under bfloat16 autocast; {args.rows} rows of {args.length} tokens a step:
forward, backward, AdamW; the median of {args.steps} steps and its quartiles."""

if __name__ == "__main__":
    main()
