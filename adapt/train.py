"""A recipe, run: what it starts from, its data, its trainer, and the model that comes of it, stage after stage."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import AutoModelForCausalLM, Trainer
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, set_seed

import rewired  # noqa: F401 - registers the rewired classes
from rewired.sources import checkpoint_folder

from . import begun, checkpoints, liger, losses
from .alignment import add_alignment
from .callbacks import DivergedError, LogBeforeSaving, MeasureDivergence
from .distillation import add_losses
from .inputs import Inputs, inputs
from .lora import add_lora
from .losses import TokenLoss
from .recipe import checks
from .recipe.choices import LORA
from .recipe.keys import NO_REFIT, Recipe, Stage
from .save import save
from .sharded_trainer import ShardedTrainer
from .start import Start, prepare
from .teacher import Teacher, beside, sharded
from .tied_head import tie
from .trainable import choose, rewired_layers
from .trainer import AdaptTrainer


def adapt(stages: Sequence[Stage], resume: bool = False, on_layer: Callable[..., None] = lambda *_: None) -> Path:
    """Run all `stages`, each on what the one before it made; the folder of the model that comes of the last.

    Everything lies in the recipe's `output_dir`. With `resume`, what is there is gone on with, from the last whole
    checkpoint. Raises ValueError with one sentence for a recipe, a model or data that cannot be used, and for a loss
    that diverges.
    """
    state, out = PartialState(), Path(str(stages[0].config.output_dir))
    begun.check_free(out, resume)
    for stage in stages:
        checks.check_devices(stage, state.num_processes)
    state.wait_for_everyone()  # before any rank writes there
    folders = [out] if len(stages) == 1 else [out / f"stage-{number}" for number in range(1, len(stages) + 1)]
    made = [*(folder / "final" for folder in folders[:-1]), out / "final"]
    runs = [stages[0], *(_following(stage, before) for before, stage in zip(made, stages[1:], strict=False))]
    begun.check_layout(out, len(stages))
    done = max((n for n, folder in enumerate(made, start=1) if (folder / "config.json").is_file()), default=0)
    for run, folder in zip(runs[:done], folders, strict=False):
        begun.check(run, folder, len(stages), rows=None)
    todo = range(done, len(stages))
    with state.main_process_first():  # whatever can be wrong is read before hours of work
        given = {number: inputs(stages[: number + 1], checkpoint_folder(stages[0].recipe.model)) for number in todo}
    for number in todo:
        begun.begin(runs[number], folders[number], len(stages), given[number].data.fingerprint)
        _run(runs[number], folders[number], made[number], given[number], on_layer)
        state.wait_for_everyone()
        _free_memory()
    return made[-1]


def is_first_rank() -> bool:
    """Whether this process speaks for all of them."""
    return bool(PartialState().is_main_process)


def _following(stage: Stage, made: Path) -> Stage:
    """`stage`, on what the one before it made; weights that were trained stay what they are."""
    return replace(stage, recipe=replace(stage.recipe, model=str(made), refit=NO_REFIT[0]))


def _run(stage: Stage, folder: Path, made: Path, given: Inputs, on_layer: Callable[..., None]) -> None:
    recipe, data, state = stage.recipe, given.data, PartialState()
    for note in data.notes:
        state.print(note)
    with state.main_process_first():
        start = prepare(recipe, folder / "start", on_layer)
    last = _last_checkpoint(folder)
    trainer = make_trainer(recipe, stage.config, folder, start, given, last)
    _train(trainer, last, folder)
    found = [*data.streamed(), *trainer.doubts()]
    for note in found:
        state.print(note)
    save(trainer, stage, start, [*data.notes, *found], made)


def _last_checkpoint(folder: Path) -> str | None:
    """The one to go on from. Newer ones that are broken are removed: save_total_limit would keep the newest."""
    state = PartialState()
    last, broken = checkpoints.last_whole(folder)
    state.wait_for_everyone()  # all have looked
    if broken:
        state.print(f"{', '.join(broken)}: broken, so this goes on from {last}.")
    for checkpoint in broken if state.is_main_process else ():
        shutil.rmtree(checkpoint)
    return last


def _free_memory() -> None:
    """A model that learns from a teacher holds itself: nothing frees it but the collector."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _train(trainer: AdaptTrainer, last: str | None, folder: Path) -> None:
    """All steps that are left after the checkpoint `last`. Raises ValueError for a loss that diverges."""
    state = PartialState()
    try:
        if not (last and trainer.load_finished(last)):
            trainer.train(resume_from_checkpoint=last)
    except DivergedError as error:
        for bad in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            if state.is_main_process and checkpoints.step(bad) > error.good:
                shutil.rmtree(bad)
        state.wait_for_everyone()
        saved, _ = checkpoints.last_whole(folder)
        kept = f"the last good checkpoint is {saved}" if saved else "no checkpoint was saved before (save_steps)"
        raise ValueError(
            f"{error}: stopped, and {kept}. A smaller learning_rate, and another output_dir, is the usual cure."
        ) from None


def make_trainer(
    recipe: Recipe,
    config: Any,
    folder: Path,
    start: Start,
    given: Inputs,
    checkpoint: str | None = None,
) -> AdaptTrainer:
    """All that a training needs, put together, to begin or to go on from `checkpoint`."""
    config.output_dir = str(folder)
    config.assistant_only_loss = False  # the labels say what is learnt
    token_loss = (liger if config.use_liger_kernel else losses).token_loss
    config.use_liger_kernel = False  # transformers would patch the model, or say that it can't
    set_seed(config.seed)  # LoRA's matrices are drawn before the trainer does so
    # the Trainer fills other models from a checkpoint, and not those that are sharded when they are loaded
    model = load_model(recipe, config, Path(checkpoint) if checkpoint and recipe.is_sharded else start.folder)
    student = _bare(model)
    layers = rewired_layers(student.config)
    teacher = make_teacher(model, recipe, config, start) if recipe.distills or given.judges else None
    trainer = (ShardedTrainer if recipe.is_sharded else AdaptTrainer)(
        model=model,
        args=config,
        train_dataset=given.data.endless(),
        processing_class=given.tokenizer,
        callbacks=[LogBeforeSaving()],
        losses=recipe.losses,
    )
    if teacher is not None:
        loss = TokenLoss(recipe.ce_weight, recipe.kd_weight, recipe.divergence, recipe.temperature)
        if recipe.align:
            add_alignment(student, teacher, layers)
        else:
            add_losses(student, teacher, loss, recipe.hidden_weight, layers, token_loss)
        if given.judges:
            trainer.add_callback(MeasureDivergence(given.judges, int(config.eval_steps), partial(Trainer.log, trainer)))
    return trainer


def load_model(recipe: Recipe, config: Any, folder: Path) -> Any:
    """The student in `folder`, a PeftModel where LoRA is trained, and frozen what is not trained."""
    options: dict[str, Any] = {"dtype": torch.float32} | (config.model_init_kwargs or {})
    if recipe.is_sharded:
        options["distributed_config"] = _distributed(recipe)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (ImportError, TypeError) as error:  # a package that is missing, a key that no model has
        raise ValueError(f"model_init_kwargs: {str(error).strip().splitlines()[0]}") from None
    config.model_init_kwargs = None
    # transformers lets gradients reach the embedding's output for checkpoints that are reentrant, which these are not:
    # backward would run through all the frozen layers below
    model.enable_input_require_grads = lambda: None
    if recipe.is_sharded and recipe.tp_size == 1 and model.config.tie_word_embeddings:
        tie(model)
    if recipe.train == LORA:
        return add_lora(model, recipe)
    choose(model, recipe.train)
    return model


def make_teacher(model: Any, recipe: Recipe, config: Any, start: Start) -> Teacher:
    """The original of the student in `model`."""
    dtype = torch.bfloat16 if config.bf16 else None
    if recipe.is_sharded and not recipe.align:  # which runs the original's projections by themselves
        return sharded(model, start.original, start.changed, start.ends_changed, dtype, _distributed(recipe))
    return beside(
        _bare(model),
        start.original,
        start.changed,
        start.ends_changed,
        dtype=dtype,
        device=config.device,
        shares=not recipe.is_sharded,
        whole=recipe.align,
        without_adapters=model.disable_adapter if isinstance(model, PeftModel) else nullcontext,
    )


def _distributed(recipe: Recipe) -> DistributedConfig:
    sizes = {name: getattr(recipe, name) for name in ("tp_size", "fsdp_size", "dp_replicate_size")}
    return DistributedConfig(**sizes, tp_plan="auto" if recipe.tp_size > 1 else None)


def _bare(model: Any) -> Any:
    """The model that PEFT wraps, if it does."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
