"""What happens beside the steps of a training: it is watched, measured, and stopped when it goes wrong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rewired.evaluate.divergence import divergence

_MUCH = 3.0  # times the best loss so far: no noise of batches, but a training that diverges
_HARD = 4.0  # nats a token: above a healthy model's cross-entropy on any text, however easy the texts before were
_PATIENCE = 5  # logs in a row


class DivergedError(Exception):
    """The loss is no number any more, or far above what it was; `good` is the last step that is known to be good."""

    def __init__(self, sentence: str, good: int) -> None:
        super().__init__(sentence)
        self.good = good


class LogBeforeSaving(TrainerCallback):
    """Logs before each checkpoint: what is logged later is of later steps alone, also where a training goes on."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Whatever made the checkpoint due."""
        control.should_log |= control.should_save

    on_epoch_end = on_step_end


class StopWhenDiverged(TrainerCallback):
    """Stops when a logged loss stays far above the best so far: the one that is minimised, or the cross-entropy, which
    tells also where the other is small by its weights or can't be large, as the Jensen-Shannon divergence.

    `is_cross_entropy` is what is minimised where no `ce` is logged beside it.
    """

    def __init__(self, is_cross_entropy: bool) -> None:
        self.losses = {"loss": _Loss(_HARD if is_cross_entropy else 0.0), "ce": _Loss(_HARD)}
        self.good = 0  # whose weights gave a loss that is not far above

    def good_until(self, step: int) -> int:
        """The last one whose weights are good, where those of `step` gave a number."""
        return min(step, self.good) if self._is_above() else step

    def doubts(self) -> str:
        """What speaks against the last weights, in too few logs to stop; nothing where nothing does."""
        found = (f"the {name} is {loss}" for name, loss in self.losses.items() if loss.above)
        return " and ".join(found)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Looks at what was logged before a training that is gone on with was cut off."""
        self.look_back(state)

    def look_back(self, state: TrainerState) -> None:
        """At all that was logged before."""
        for entry in state.log_history:
            self._look(entry, int(entry["step"]))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **others: Any
    ) -> None:
        """Looks at the losses that are logged."""
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
    """One that is watched. The best is that of several logs: in a log of few tokens it may be small by luck."""

    def __init__(self, least: float) -> None:
        self.least = least  # that is far above
        self.best, self.above = math.inf, 0  # in so many logs, the last ones
        self.last = deque[float](maxlen=_PATIENCE)

    def __str__(self) -> str:
        return f"{self.last[-1]:.2f}, and was {self.best:.2f} before"

    def look(self, loss: float) -> None:
        is_first = not self.last
        self.last.append(loss)
        if is_first or len(self.last) == _PATIENCE:
            self.best = min(self.best, median(self.last))
        self.above = self.above + 1 if loss > max(_MUCH * self.best + 1, self.least) else 0


class MeasureDivergence(TrainerCallback):
    """How far the model is from the original on text that it is never trained on, before, while and after it is."""

    def __init__(
        self,
        texts: list[torch.Tensor],
        every: int,
        log: Callable[[dict[str, float]], None],
    ) -> None:
        self.texts, self.every, self.log = texts, every, log

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Before the first step; not when a training is gone on with."""
        if state.global_step == 0:
            self._measure(others["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Every so many steps, and after the last."""
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            was_due = control.should_log
            self._measure(others["model"])
            control.should_log = was_due  # a log of our own counts as the one that is due

    def _measure(self, model: Any) -> None:
        was_training = model.training
        model.eval()
        texts = [ids.to(model.device) for ids in self.texts]
        found = divergence(
            lambda ids: model(input_ids=ids, original=True), lambda ids: model(input_ids=ids).logits, texts
        )
        model.train(was_training)
        self.log(
            {"held_out_kl": found.kl, "held_out_perplexity": found.perplexity, "held_out_top1": found.agreement[1]}
        )
