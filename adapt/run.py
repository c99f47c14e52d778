"""A run of `adapt`: a recipe's stages, one after another, each on the model that the one before it made.

A training step on its way, and where to read it:

    AdaptTrainer.compute_loss                      trainer/trainer.py: TRL's loop calls it for each batch
      ├─ model(**batch, distils=True)              losses/distillation.py: the forward that `add_losses` has patched
      │    ├─ student's layers ─> states [N, H]
      │    │    └─ hook ─> slot [B, T, H]          the stream before the first layer that differs from the original's
      │    ├─ teacher(slot) ─> states [N, H]       model/teacher.py: the original's layers from there on, no gradient
      │    ├─ token_loss(states, heads, labels)    losses/token_loss.py: ce and kd, in chunks of tokens
      │    ├─ relative_error(streams)              losses/token_loss.py: hidden, after each rewired layer
      │    └─> Losses(total, ce, kd, hidden, tokens)
      └─ total / tokens ─> backward                of all ranks; the parts are added up for the log

In SFT, TRL's own loss is computed, and the teacher only measures the held-out KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from accelerate import PartialState

from rewired.progress import announce
from rewired.ranks import free_memory

from . import extension
from .assemble import make_trainer
from .preflight import CheckedStage, check_stage
from .recipe import checks
from .recipe.keys import NO_REFIT, Stage
from .save import save
from .scratch import tokenizer_of
from .start import prepare
from .trainer import checkpoints, other_ranks, run_lock, run_manifest
from .trainer.callbacks import DivergedError
from .trainer.trainer import AdaptTrainer

_ALONE = 36_000.0  # seconds that the other ranks wait where the first one works alone, in a refit for example


def adapt(stages: Sequence[Stage], resume: bool = False) -> Path:
    """Run all `stages`, each on the model that the one before it made, and return the folder of the last one's model.

    Everything is written to the recipe's `output_dir`. With `resume`, the training there goes on from its last whole
    checkpoint; if it was finished and is now to take more steps, it goes on beyond its end. Raises ValueError with one
    sentence for a recipe, a model or data that cannot be used, and for a loss that diverges.
    """
    out = Path(str(stages[0].config.output_dir))
    run_manifest.check_free(out, resume=True)  # more of it is asked once nobody else writes there
    with run_lock.locked(out), other_ranks.errors():
        return _adapt(stages, out, resume)


class _Run(NamedTuple):
    """One stage, in a folder of its own, whose model goes to `final`."""

    stage: Stage
    folder: Path
    final: Path


def _runs(stages: Sequence[Stage], out: Path) -> list[_Run]:
    """All stages; each trains the model of the one before it, in whatever wiring, without another refit."""
    if len(stages) == 1:
        return [_Run(stages[0], out, out / "final")]
    runs = list[_Run]()
    for number, stage in enumerate(stages, start=1):
        if runs:
            made = str(runs[-1].final)
            recipe = replace(stage.recipe, model=made, init=None, tokenizer=None, refit=NO_REFIT[0], retrain=True)
            stage = replace(stage, recipe=recipe)
        folder = out / f"stage-{number}"
        runs.append(_Run(stage, folder, (out if number == len(stages) else folder) / "final"))
    return runs


def _adapt(stages: Sequence[Stage], out: Path, resume: bool) -> Path:
    """`adapt` in `out`, which no other run writes."""
    state, runs = PartialState(), _runs(stages, out)
    other_ranks.wait_for(_ALONE)
    run_manifest.check_free(out, resume)
    for stage in stages:
        checks.check_devices(stage, state.num_processes)
    state.wait_for_everyone()  # before any rank writes there
    run_manifest.check_layout(out, len(runs))
    done = _finished(runs)
    for run in runs[:done]:
        run_manifest.check(run.stage, run.folder, len(runs), rows=None)
    # all that can be wrong is checked before hours of work
    with state.main_process_first(), tokenizer_of(stages[0].recipe) as tokenizer:
        checked = [check_stage(stages[: number + 1], tokenizer) for number in range(done, len(runs))]
    for run, found in zip(runs[done:], checked, strict=True):
        is_extended = run.final.is_dir()
        if is_extended:
            extension.check(run.stage, run.folder, run.final, found.corpus)
        run_manifest.begin(run.stage, run.folder, len(runs), found.corpus.fingerprint)
        if is_extended:
            extension.set_aside(run.final)
        _run(*run, found)
        state.wait_for_everyone()
        free_memory()
    return runs[-1].final


def _finished(runs: Sequence[_Run]) -> int:
    """How many of the first runs are finished; a last one that is to take another number of steps is not."""
    done = max((n for n, run in enumerate(runs, start=1) if (run.final / "config.json").is_file()), default=0)
    return done - (done == len(runs) and run_manifest.has_other_length(runs[-1].stage, runs[-1].folder))


def _run(stage: Stage, folder: Path, final: Path, checked: CheckedStage) -> None:
    """One stage: convert, assemble the trainer, train, and save the model."""
    state = PartialState()
    for note in checked.corpus.notes:
        state.print(note)
    with state.main_process_first():
        start = prepare(stage.recipe, folder / "start", int(stage.config.seed))
    checkpoint = checkpoints.resume_point(folder)
    trainer = make_trainer(stage, folder, start, checked, checkpoint)
    if checkpoint:
        announce(f"Going on from {checkpoint}.")
    _train(trainer, checkpoint, folder)
    afterwards = [*checked.corpus.streamed(), *trainer.schedule.notes, *trainer.stability_warnings()]
    for note in afterwards:
        state.print(note)
    save(trainer, stage, start, [*checked.corpus.notes, *afterwards], final)


def _train(trainer: AdaptTrainer, checkpoint: str | None, folder: Path) -> None:
    """Train all steps that are left after `checkpoint`. Raises ValueError for a loss that diverges."""
    other_ranks.wait_for(float(trainer.args.ddp_timeout))
    try:
        if not (checkpoint and trainer.load_finished(checkpoint)):
            trainer.train(resume_from_checkpoint=checkpoint)
    except DivergedError as error:
        checkpoints.remove_after(folder, error.good)
        saved, _ = checkpoints.last_whole(folder)
        good = f"the last good checkpoint is {saved}" if saved else "no checkpoint was saved before (save_steps)"
        raise ValueError(
            f"{error}: stopped, and {good}. A smaller learning_rate, and another output_dir, is the usual cure."
        ) from None
    other_ranks.wait_for(_ALONE)
