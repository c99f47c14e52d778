"""The trainer of a model that is sharded when it is loaded, for which transformers' Trainer saves no optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from transformers.distributed import load_optimizer_distributed, save_optimizer_distributed
from transformers.trainer import SCHEDULER_NAME

from ..recipe.companions import Attached
from .trainer import AdaptTrainer

_MOMENTS = "optimizer"


class ShardedTrainer(AdaptTrainer):
    """AdaptTrainer where each rank saves and loads its own part of the weights and of the optimizer's moments.

    The Trainer accepts such a model only with `save_only_model`, and then saves nothing but the weights: `_save` adds
    all else that a training needs to be resumed.
    """

    model: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, companions: Sequence[Attached] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._companions = companions
        # autocast keeps the copies that it casts until forward ends: of gathered weights, those of all layers
        self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        # adapters alone leave the group without weight decay empty, and torch cannot load the state of such a one
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        for companion in self._companions:
            companion.follow(optimizer)
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        for companion in self._companions:
            companion.at(self.state.global_step / self.state.max_steps)
        return super().training_step(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        assert output_dir is not None, "only checkpoints are saved"
        self.model.save_pretrained(output_dir, distributed_checkpoint=True, is_main_process=self.args.should_save)
        self._save_optimizer_and_scheduler(output_dir)
        self._save_scaler(output_dir)
        self._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: the model was loaded from there."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer_distributed(self.model, self._bare_optimizer, str(Path(output_dir) / _MOMENTS))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
        for companion in self._companions:
            torch.save(companion.state_dict(), self._file_of(companion, output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_optimizer_distributed(self.model, self._bare_optimizer, str(Path(checkpoint) / _MOMENTS))
        state = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        groups = len(self._bare_optimizer.param_groups)  # as many as there are meshes, all with the same rate
        of_groups = {name: value[:1] * groups for name, value in state.items() if isinstance(value, list)}
        self.lr_scheduler.load_state_dict(state | of_groups)
        for companion in self._companions:
            file, device = self._file_of(companion, checkpoint), self.args.device.type
            companion.load_state_dict(torch.load(file, map_location=device, weights_only=True))

    def _file_of(self, companion: Attached, folder: str) -> Path:
        return Path(folder) / f"{type(companion).__name__.lower()}-{self.args.process_index}.pt"

    @property
    def _bare_optimizer(self) -> torch.optim.Optimizer:
        """Torch's; accelerate wraps it once it is prepared."""
        prepared: Any = self.optimizer
        bare: torch.optim.Optimizer = getattr(prepared, "optimizer", prepared)
        return bare
