"""One training step of a trainer, as a function to time: forward, backward, optimizer; batches take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.integrations.liger import apply_liger_kernel

Step = Callable[[], None]


def step_of(trainer: Any) -> Step:
    if trainer.args.use_liger_kernel:  # which train() would do
        apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
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
