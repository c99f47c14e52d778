"""A finished training that is extended: it goes on from its last checkpoint, and its model is set aside."""

from __future__ import annotations

from pathlib import Path

from accelerate import PartialState

from rewired import quantities
from rewired.checkpoint.checkpoint import Checkpoint

from .data.corpus import Corpus
from .data.steps import TrainingSteps
from .recipe.keys import Stage
from .start import RECORD
from .trainer import checkpoints


def check(stage: Stage, folder: Path, final: Path, corpus: Corpus) -> None:
    """Raise ValueError if `stage`, whose model is in `final`, cannot take more steps."""
    trained, steps = _steps(final), TrainingSteps.of(stage.recipe, stage.config, corpus.train).count
    other = f"choose another output_dir, where --model {final} goes on from this model"
    if steps <= trained:
        raise ValueError(
            f"{final} has been trained for {quantities.count(trained, 'step')}, and {steps:,} are asked for: "
            f"ask for more, or {other}."
        )
    if checkpoints.last_whole(folder)[0] is None:
        raise ValueError(f"{folder} has no checkpoint from which the training could be extended: {other}.")


def set_aside(final: Path) -> None:
    """Rename `final` after its number of steps. All ranks have to call this."""
    state, steps = PartialState(), _steps(final)
    aside = final.with_name(f"{final.name}-{steps}")
    state.wait_for_everyone()  # all have looked
    if state.is_main_process:
        final.rename(aside)
    state.print(f"The model of {quantities.count(steps, 'step')} is now {aside}, and the training goes on.")


def _steps(final: Path) -> int:
    """The number of steps that the model in `final` was trained for."""
    return int(Checkpoint.open(final).config[RECORD]["steps"])
