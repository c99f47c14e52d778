"""Callbacks of the trainer: what is due at the end of a step, the rate of a resumed training, stopping when a loss
diverges, and the held-out KL."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SchedulerType

from rewired import quantities, signals
from rewired.divergence import divergence
from rewired.progress import Progress, announce

_FAR_ABOVE = 3.0  # times the best loss so far: more than the noise between batches
_HIGH = 4.0  # nats a token: above a healthy model's cross-entropy on any text, however easy the texts before were
_PATIENCE = 5  # logs in a row


class DivergedError(Exception):
    """A loss that is not finite, or stays far above its best; `good` is the last step that is known to be good."""

    def __init__(self, sentence: str, good: int) -> None:
        super().__init__(sentence)
        self.good = good


class EndOfStep(TrainerCallback):
    """Ends a run that was asked to end, and logs before each checkpoint, so that a resumed training logs the same means
    over steps."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        signals.check()
        control.should_log |= control.should_save

    on_epoch_end = on_step_end


class FollowSchedule(TrainerCallback):
    """Gives a resumed training the learning rate that its schedule has at the first step to come.

    A checkpoint brings the rate that was next in the schedule it was saved under, which is another one's where the
    training was extended. `notes` say so, if the rate jumps.
    """

    def __init__(self) -> None:
        self.notes = list[str]()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        scheduler = others["lr_scheduler"]
        if state.global_step == 0 or not isinstance(scheduler, LambdaLR):
            return
        before = scheduler.get_last_lr()[0]
        scheduler.last_epoch -= 1
        scheduler.step()  # the same again, by the schedule of now
        after = scheduler.get_last_lr()[0]
        if before != after:
            self.notes.append(
                f"After {quantities.count(state.global_step, 'step')} the learning rate jumps from {before:.3g} to "
                f"{after:.3g}: from there on it is what the schedule ({SchedulerType(args.lr_scheduler_type).value}) "
                f"of {quantities.count(state.max_steps, 'step')} has."
            )


class StopWhenDiverged(TrainerCallback):
    """Stops when a logged loss stays far above its best: the one that is minimised, or the cross-entropy, which rises
    even where the other is kept small by its weight or is bounded, as the Jensen-Shannon divergence is.

    With `is_cross_entropy`, the loss that is minimised is the cross-entropy, and no `ce` is logged beside it.
    """

    def __init__(self, is_cross_entropy: bool) -> None:
        self.losses = {"loss": _Loss(_HIGH if is_cross_entropy else 0.0), "ce": _Loss(_HIGH)}
        self.good = 0  # the last step whose weights gave a loss that is not far above

    def good_until(self, step: int) -> int:
        """The last step that is known to be good, if the weights of `step` gave a finite loss."""
        return min(step, self.good) if self._is_above() else step

    def high_losses(self) -> str:
        """The losses that are far above their best, in too few logs to stop; empty if none is."""
        return " and ".join(f"the {name} is {loss}" for name, loss in self.losses.items() if loss.above)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        for entry in state.log_history:  # where a training is resumed
            self._look(entry, int(entry["step"]))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **others: Any) -> None:
        self._look(logs or {}, state.global_step)

    def _look(self, logs: Mapping[str, float], step: int) -> None:
        for name in self.losses.keys() & logs.keys():
            self.losses[name].look(logs[name])
        if "loss" in logs and not self._is_above():
            self.good = step - 1  # the loss of a step is that of the weights before it
        for name, loss in self.losses.items():
            if loss.above == _PATIENCE:
                raise DivergedError(f"At step {step} the {name} is {loss}", self.good)

    def _is_above(self) -> bool:
        return any(loss.above for loss in self.losses.values())


class _Loss:
    """A loss that is watched. Its best is a median over several logs: one log of few tokens may be low by chance."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold  # below which no loss counts as far above
        self.best = math.inf
        self.above = 0  # the number of last logs in which it is far above
        self.last = deque[float](maxlen=_PATIENCE)

    def __str__(self) -> str:
        return f"{self.last[-1]:.2f}, and was {self.best:.2f} before"

    def look(self, loss: float) -> None:
        is_first = not self.last
        self.last.append(loss)
        if is_first or len(self.last) == _PATIENCE:
            self.best = min(self.best, median(self.last))
        self.above = self.above + 1 if loss > max(_FAR_ABOVE * self.best + 1, self.threshold) else 0


class MeasureDivergence(TrainerCallback):
    """Measures KL(original || model) on held-out texts, each [T], before, during and after the training."""

    def __init__(
        self,
        texts: list[torch.Tensor],
        every: int,
        log: Callable[[dict[str, float]], None],
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`every`: steps between measurements. `paused()` stops the training's clock."""
        self.texts, self.every, self.log, self.paused = texts, every, log, paused

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if state.global_step == 0:  # else it is resumed
            tokens = quantities.count(sum(map(len, self.texts)), "token")
            announce(
                f"Before the first step, and every {quantities.count(self.every, 'step')}: KL to the original on "
                f"{quantities.count(len(self.texts), 'held-out row')} of {tokens}."
            )
            self._measure(others["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            was_due = control.should_log
            self._measure(others["model"])
            control.should_log = was_due  # our own log counts as the one that is due

    def _measure(self, model: Any) -> None:
        was_training = model.training
        model.eval()
        texts = [ids.to(model.device) for ids in self.texts]
        with self.paused(), Progress("held-out row", len(texts)) as progress:
            measured = divergence(
                lambda ids: model(input_ids=ids, original=True),
                lambda ids: model(input_ids=ids).logits,
                texts,
                progress.advance,
            )
        model.train(was_training)
        kl, perplexity, top1 = measured.kl, measured.perplexity, measured.agreement[1]
        self.log({"held_out_kl": kl, "held_out_perplexity": perplexity, "held_out_top1": top1})
