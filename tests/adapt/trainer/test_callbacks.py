"""A training is stopped when its loss goes away, and not when it is noisy; what was good before is known."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from rewired.adapt.trainer.callbacks import DivergedError, StopWhenDiverged


def feed(losses: list[float], each: int = 10, cut_off_after: int = 0, **others: list[float]) -> StopWhenDiverged:
    """What is logged every so many steps, of a training that is gone on with after so many logs."""
    state, arguments = TrainerState(), TrainingArguments(output_dir="unused", use_cpu=True)
    watch = StopWhenDiverged(is_cross_entropy="ce" not in others)
    for number, loss in enumerate(losses, start=1):
        state.global_step = number * each
        logs: dict[str, Any] = {"loss": loss} | {name: values[number - 1] for name, values in others.items()}
        watch.on_log(arguments, state, TrainerControl(), logs=logs)
        state.log_history.append(logs | {"step": state.global_step})
        if number == cut_off_after:
            watch = StopWhenDiverged(is_cross_entropy="ce" not in others)
            watch.on_train_begin(arguments, state, TrainerControl())
    return watch


@pytest.mark.parametrize("cut_off_after", [0, 4, 8])
def test_a_loss_that_stays_far_above_stops_and_the_last_healthy_step_is_known(cut_off_after: int) -> None:
    with pytest.raises(DivergedError, match=r"At step 110 the loss is 50\.00, and was 2\.00") as stopped:
        feed([2.0, 2.1, 2.3, 2.2, 2.1, 2.4, *[50.0] * 5], cut_off_after=cut_off_after)
    assert stopped.value.good == 59, "the loss of step 60 is that of the weights before it"


def test_a_training_that_diverges_at_once_stops() -> None:
    with pytest.raises(DivergedError, match=r"At step 60 the loss is 50\.00, and was 2\.00"):
        feed([2.0, *[50.0] * 9])


def test_a_loss_that_cannot_be_large_is_told_by_the_cross_entropy() -> None:
    """The Jensen-Shannon divergence is at most ln 2."""
    with pytest.raises(DivergedError, match=r"At step 80 the ce is 12\.00, and was 2\.00") as stopped:
        feed([0.1, 0.1, 0.1, *[0.69] * 5], ce=[2.0, 2.0, 2.0, *[12.0] * 5])
    assert stopped.value.good == 29


def test_where_a_loss_far_above_becomes_no_number_the_last_good_step_is_before_both() -> None:
    watch = feed([2.0, 2.1, 50.0, 60.0])
    assert watch.good_until(44) == 19
    assert feed([2.0, 2.1]).good_until(24) == 24, "no log said otherwise of the steps since the last"


def test_far_from_the_original_is_far_at_less() -> None:
    with pytest.raises(DivergedError, match=r"At step 80 the loss is 2\.00, and was 0\.10"):
        feed([0.1, 0.1, 0.1, *[2.0] * 5], ce=[2.0, 2.0, 2.0, *[3.9] * 5])


def test_harder_texts_do_not_stop() -> None:
    """Answers of one word first, and prose then: the cross-entropy rises, and nothing is wrong with the model."""
    answers, prose = [0.2] * 9, [1.8, 3.2, 2.4] * 3
    feed(answers + prose)
    feed([0.3] * 18, ce=answers + prose)


@pytest.mark.parametrize(
    "losses",
    [
        [9.0, 3.0, 5.0, 2.0, 4.0] * 6,
        [0.01, 0.2, 0.5] * 9,
        [2.0, 50.0, 50.0, 2.0] * 9,
        [1.9, 1.6, 1.7, 0.12, *[1.5, 1.6, 1.4, 1.7] * 9],
    ],
)
def test_noise_does_not_stop(losses: list[float]) -> None:
    feed(losses)
