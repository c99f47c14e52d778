"""Training of a model that is sharded at load time: checkpoints, of which transformers' Trainer writes none to go on
from, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from transformers.distributed import load_optimizer_distributed, save_optimizer_distributed
from transformers.trainer import SCHEDULER_NAME

from .trainer import AdaptTrainer

_MOMENTS = "optimizer"


class ShardedTrainer(AdaptTrainer):
    """AdaptTrainer, where each rank writes and reads its own part of the weights and of the optimizer's moments, and
    holds no layer whole for longer than it runs."""

    model: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs["args"]
        config.save_only_model = True  # the Trainer refuses anything else
        super().__init__(*args, **kwargs)
        config.save_only_model = False
        # autocast keeps the copies that it casts until forward ends: of weights that were gathered for a layer, all
        self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self.model.save_pretrained(output_dir, distributed_checkpoint=True, is_main_process=self.args.should_save)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The model was loaded from there."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer_distributed(self.model, self._bare_optimizer, str(Path(output_dir) / _MOMENTS))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_optimizer_distributed(self.model, self._bare_optimizer, str(Path(checkpoint) / _MOMENTS))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    @property
    def _bare_optimizer(self) -> torch.optim.Optimizer:
        """Torch's; accelerate wraps it once it is prepared."""
        prepared: Any = self.optimizer
        found: torch.optim.Optimizer = getattr(prepared, "optimizer", prepared)
        return found
