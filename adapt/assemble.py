"""A stage's trainer, assembled: the student, its teacher, the losses between them, and TRL's trainer around them."""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer
from transformers.trainer_utils import set_seed
from trl import SFTConfig

from rewired.progress import announce

from .losses.distillation import add_losses
from .losses.token_loss import TokenLoss
from .model import teacher as teachers
from .model.shared_teacher import runs_within, within
from .model.student import distributed_config, load_student, unwrapped
from .model.teacher import Teacher
from .model.trainable import learn_in_float32, rewired_layers
from .preflight import CheckedStage
from .recipe.keys import Recipe, Stage
from .start import Start
from .trainer.callbacks import EndOfStep, MeasureDivergence
from .trainer.sharded import ShardedTrainer
from .trainer.speed import flops_per_token
from .trainer.trainer import AdaptTrainer


def make_trainer(
    stage: Stage, folder: Path, start: Start, checked: CheckedStage, checkpoint: str | None = None
) -> AdaptTrainer:
    """The trainer of `stage`, whose output goes to `folder`: to begin at `start`, or to go on from `checkpoint`."""
    recipe = stage.recipe
    config: Any = stage.config
    set_seed(config.seed)  # LoRA's matrices are drawn before the trainer sets it
    # the Trainer loads checkpoints into other models, but not into those that are sharded when they are loaded
    weights = Path(checkpoint) if checkpoint and recipe.is_sharded else start.folder
    needs_teacher = recipe.distills or bool(checked.held_out)
    announce(f"Loading the model{' and its original' if needs_teacher else ''}.")
    model = load_student(recipe, weights, config.model_init_kwargs)
    teacher = make_teacher(model, recipe, config, start) if needs_teacher else None  # before TRL wraps the model
    if config.packing and not recipe.streaming:
        announce(f"Packing rows to {config.max_length:,} tokens.")
    attached = [each.attach(recipe, model, teacher.model if teacher else None) for each in stage.companions]
    sharding = {"companions": [each for each in attached if each]} if recipe.is_sharded else {}
    trainer = (ShardedTrainer if recipe.is_sharded else AdaptTrainer)(
        model=model,
        args=_trainer_config(recipe, config, folder),
        train_dataset=checked.corpus.endless(),
        processing_class=checked.tokenizer,
        callbacks=[EndOfStep()],
        losses=recipe.losses,
        **sharding,
    )
    if recipe.load_in_4bit and not recipe.is_sharded:
        learn_in_float32(model)  # which TRL holds in bfloat16 beside weights in 4 bits
    trainer.flops_per_token = flops_per_token(unwrapped(model), teacher if recipe.distills else None)
    if teacher is not None:
        loss = TokenLoss(recipe.ce_weight, recipe.kd_weight, recipe.divergence, recipe.temperature)
        layers = rewired_layers(unwrapped(model).config)
        add_losses(unwrapped(model), teacher, loss, recipe.hidden_weight, layers)  # SFT measures held-out texts only
    if checked.held_out:
        log = partial(Trainer.log, trainer)
        trainer.add_callback(MeasureDivergence(checked.held_out, int(config.eval_steps), log, trainer.paused))
    return trainer


def make_teacher(model: Any, recipe: Recipe, config: SFTConfig, start: Start) -> Teacher:
    """The original of the student `model`."""
    dtype = torch.bfloat16 if config.bf16 else None
    if runs_within(recipe, start.changed):
        return within(model, start.original)
    if recipe.is_sharded:
        distributed = distributed_config(recipe, model.config)
        return teachers.sharded(model, start.original, start.changed, dtype, distributed, recipe.load_in_4bit)
    return teachers.beside(
        unwrapped(model),
        start.original,
        start.changed,
        dtype=dtype,
        device=config.device,
        without_adapters=model.disable_adapter if isinstance(model, PeftModel) else nullcontext,
    )


def _trainer_config(recipe: Recipe, config: SFTConfig, folder: Path) -> SFTConfig:
    """A copy of the recipe's `config` without what TRL and transformers would do once more, or otherwise.

    `dataclasses.replace` would call `__post_init__` on values that it has been called on before.
    """
    changed = copy(config)
    changed.output_dir = str(folder)
    changed.assistant_only_loss = False  # the labels say what is learnt
    changed.model_init_kwargs = None  # the model is loaded
    changed.chat_template_path = None  # the tokenizer has it
    changed.save_only_model = recipe.is_sharded  # ShardedTrainer saves the rest
    return changed
