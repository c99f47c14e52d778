"""The learning rate's schedule: warm-ups that outlast a training, and trainings that are extended."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SchedulerType

from rewired import quantities

_WITHOUT_WARMUP = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def warmup_warning(config: TrainingArguments, steps: int) -> str | None:
    """A sentence if the rate is still warming up at the last of `steps`, None if not."""
    warmup = config.get_warmup_steps(steps)
    if config.lr_scheduler_type in _WITHOUT_WARMUP or warmup < max(steps, 1):
        return None
    return (
        f"The learning rate warms up for {quantities.count(warmup, 'step')}, and the training has only "
        f"{quantities.count(steps, 'step')}: it never reaches {config.learning_rate:g}. Give fewer warmup_steps."
    )


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
        before, step = scheduler.get_last_lr(), scheduler.last_epoch
        after = [base * scale(step) for base, scale in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        if before == after:
            return
        for group, rate in zip(others["optimizer"].param_groups, after, strict=True):
            group["lr"] = rate
        scheduler._last_lr = after
        name = SchedulerType(args.lr_scheduler_type).value
        self.notes.append(
            f"After {quantities.count(state.global_step, 'step')} the learning rate jumps from {before[0]:.3g} to "
            f"{after[0]:.3g}: from there on it is what the schedule ({name}) of "
            f"{quantities.count(state.max_steps, 'step')} has."
        )
