"""Trainings of one model on the same rows, of which a step can be timed: TRL's, and `adapt`'s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import rewired  # noqa: F401 - registers the rewired classes
from rewired.adapt.losses.distillation import add_losses
from rewired.adapt.losses.token_loss import TokenLoss
from rewired.adapt.model.teacher import beside
from rewired.adapt.model.trainable import choose, rewired_layers
from rewired.adapt.trainer.trainer import AdaptTrainer
from rewired.convert import Request, convert

Step = Callable[[], None]  # forward, backward, optimizer


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

    def sft(self, preset: str, layers: str, train: str = "all") -> Step:
        return _step(AdaptTrainer(self._student(preset, layers, train), self._arguments(), **self._data))

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
