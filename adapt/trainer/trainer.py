"""TRL's SFTTrainer with losses against a teacher, whole checkpoints, and a stop when a loss diverges."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import SFTTrainer

from ..losses.distillation import Losses
from ..model.student import unwrapped
from . import checkpoints
from .callbacks import DivergedError, FollowSchedule, StopWhenDiverged
from .checkpoints import SAVING
from .speed import Waits, peak_flops


class AdaptTrainer(SFTTrainer):
    """SFTTrainer that, given the names of `losses`, minimises the total of the `Losses` that the model's forward gives,
    and logs those named. Without names it computes TRL's own loss."""

    def __init__(self, *args: Any, losses: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses = losses
        self._sums = dict.fromkeys(Losses._fields, 0.0)  # since the last log
        self._logged = (time.perf_counter(), 0)
        self.flops_per_token = 0
        self._waits = Waits()
        self._watch = StopWhenDiverged(is_cross_entropy=not losses)
        self.schedule = FollowSchedule()
        for callback in (self._watch, self.schedule):
            self.add_callback(callback)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """TRL's loss, or that against the teacher: a mean over the tokens of all ranks and accumulation steps."""
        if not self.losses:
            seen, is_trained = self._total_train_tokens, model.training
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if is_trained:  # TRL takes a rank's count for rows, and drops some ranks' at the end of an epoch
                self._set_tokens(seen + int(self.accelerator.reduce(_tokens_in(inputs))) // self._tp_size)
            return loss
        losses: Losses = model(**inputs, distils=True)
        tokens = losses.tokens if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss = losses.total / tokens.clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())  # gradients are averaged over ranks
        self._count(losses, inputs)
        return (loss, losses) if return_outputs else loss

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Gains of peeking modules are spared weight decay, as norms are: it would draw them to 0."""
        names, gains = super().get_decay_parameter_names(model), unwrapped(model).family.gains
        return [name for name in names if not any(f".{gain}." in name for gain in gains)]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """SFTTrainer's step. Raises DivergedError, on all ranks, for a loss that is not finite."""
        with self._waits.during_step() if self.get_tp_size() > 1 else nullcontext():
            loss = super().training_step(*args, **kwargs)
            total = self.accelerator.reduce(loss.detach().clone())  # over ranks
            is_finite = bool(torch.isfinite(total))
        if not is_finite:
            step = self.state.global_step  # whose weights give this loss; those before gave a finite one
            raise DivergedError(f"At step {step + 1} the loss is {total.item()}", self._watch.good_until(step - 1))
        return loss

    def _count(self, losses: Losses, inputs: dict[str, Any]) -> None:
        """Add up the losses and the tokens that the model has read, for the log."""
        if not losses.total.requires_grad:  # not a training step
            return
        counts = torch.stack([part.detach().float() for part in (*losses, _tokens_in(inputs))])
        *sums, tokens = self.accelerator.reduce(counts).tolist()
        for name, value in zip(Losses._fields, sums, strict=True):
            self._sums[name] += value
        self._set_tokens(self._total_train_tokens + int(tokens) // self._tp_size)

    def _set_tokens(self, count: int) -> None:
        self._total_train_tokens = count
        self._metrics["train"]["num_tokens"] = [count]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time that passes meanwhile out of the logged tokens per second."""
        started = time.perf_counter()
        yield
        since, tokens = self._logged
        self._logged = (since + time.perf_counter() - started, tokens)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """SFTTrainer's training, after which the last step is checked."""
        output = super().train(*args, **kwargs)
        self._check_last_step()
        return output

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """The count of tokens goes on where a training is resumed."""
        progress: tuple[int, int] = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)  # not the checkpoint's logging_steps and save_steps
        self._total_train_tokens = _tokens_seen(self.state)
        self._logged = (time.perf_counter(), self._total_train_tokens)
        return progress

    def _check_last_step(self) -> None:
        """Raise DivergedError, on all ranks, if the last step broke the weights, which no later loss would show."""
        model: Any = self.model_wrapped
        model.eval()
        inputs = self._prepare_inputs(next(iter(self.get_train_dataloader())))
        with torch.no_grad(), self.accelerator.autocast():  # a model brings its own only once it is prepared
            loss = self.accelerator.reduce(self.compute_loss(model, inputs).clone())
        if not torch.isfinite(loss):
            step = self.state.global_step
            raise DivergedError(f"After step {step} the loss is {loss.item()}", self._watch.good_until(step - 1))

    def load_finished(self, checkpoint: str) -> bool:
        """Load `checkpoint` if the training ends there, and say whether it does: transformers would train one more
        step."""
        state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        if self.args.max_steps > 0:
            is_finished = state.global_step >= self.args.max_steps
        else:
            is_finished = (
                state.global_step >= state.max_steps and self.args.num_train_epochs < (state.epoch or 0) + 1e-6
            )
        if not is_finished:
            return False
        self._load_from_checkpoint(checkpoint)
        self.state = state
        self._total_train_tokens = _tokens_seen(state)
        self._watch.on_train_begin(self.args, state, self.control)
        self._check_last_step()
        return True

    def stability_warnings(self) -> list[str]:
        """A note on the final weights for those who use them, if the last logged losses are far above the best."""
        high_losses = self._watch.high_losses()
        if not high_losses:
            return []
        good = checkpoints.newest_until(Path(str(self.args.output_dir)), self._watch.good)
        known = f"{Path(good).name} is the last checkpoint known to be good" if good else "no checkpoint is from before"
        return [f"At the end {high_losses}: {known}."]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the losses per token and, since the last log, the tokens per second, the share of the devices' peak
        (model FLOPs utilisation) where it is known, and the share of steps that waits for tensor-parallel ranks."""
        if "loss" in logs:
            if self.losses:
                count = max(self._sums["tokens"], 1)
                logs["loss"] = self._sums["total"] / count
                logs |= {name: self._sums[name] / count for name in self.losses}
                self._sums = dict.fromkeys(Losses._fields, 0.0)
            before, tokens = self._logged
            self._logged = (time.perf_counter(), self._total_train_tokens)
            speed = (self._logged[1] - tokens) / (self._logged[0] - before)
            logs["tokens_per_second"] = round(speed, 1)
            if peak := peak_flops(self.args.device):
                logs["mfu"] = round(speed * self.flops_per_token / (peak * self.accelerator.num_processes), 4)
            if self.get_tp_size() > 1:
                logs["waits"] = round(self._waits.share(), 3)
        super().log(logs, start_time)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `save` writes the card of the trained model."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(super()._get_output_dir(trial)) / SAVING)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes a checkpoint aside and moves it into place once it is on the disk, so that it is whole or not there,
        whenever this process is killed. The newest one that is known to be good is not rotated away."""
        with self.paused():
            self._save_whole(model, trial)

    def _save_whole(self, model: nn.Module, trial: Any) -> None:
        out, name = Path(str(self.args.output_dir)), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.is_world_process_zero():
            shutil.rmtree(out / SAVING, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with checkpoints.disk_errors(f"{out / name}", out):
            super()._save_checkpoint(model, trial)
            os.sync()
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                checkpoints.record(out / SAVING / name)
        if self.is_world_process_zero():
            shutil.rmtree(out / name, ignore_errors=True)
            (out / SAVING / name).rename(out / name)
            good = checkpoints.newest_until(out, self._watch.good)
            rotate_checkpoints(str(out), self.args.save_total_limit, best_model_checkpoint=good, use_mtime=False)
        self.accelerator.wait_for_everyone()


def _tokens_in(inputs: dict[str, Any]) -> torch.Tensor:
    ids: torch.Tensor = inputs["input_ids"]
    return inputs["attention_mask"].sum() if "attention_mask" in inputs else ids.new_tensor(ids.numel())


def _tokens_seen(state: TrainerState) -> int:
    """Those of a training up to a checkpoint, before which they are logged; 0 of a new one."""
    return int(next((entry["num_tokens"] for entry in reversed(state.log_history) if "num_tokens" in entry), 0))
