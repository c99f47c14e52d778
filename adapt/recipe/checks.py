"""Checks of what a recipe asks of TRL, transformers and the launcher, made before hours of a refit."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import Trainer, get_scheduler
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
from trl import SFTConfig

from .keys import Recipe, Stage
from .unsupported import ONE_WAY_TO_SHARD

_COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "pad_to_multiple_of",
    "eval_steps",
    "num_train_epochs",
)
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def check(config: SFTConfig, recipe: Recipe) -> None:
    """Raise ValueError for what cannot be run here, or would spoil the losses against the original."""
    _check_numbers(config)
    if recipe.from_scratch and config.eval_steps:
        raise ValueError("eval_steps measures KL to the original, and init: scratch has none: leave it out.")
    if config.eval_steps and not recipe.held_out:
        raise ValueError("eval_steps measures on rows that are held out: give held_out.")
    if recipe.streaming and config.max_steps < 1:
        raise ValueError("A stream has no known length: give max_steps.")
    if recipe.streaming and config.dataloader_num_workers:
        raise ValueError(
            "A stream is read, and its rows are counted, where it trains: leave dataloader_num_workers out."
        )
    if config.packing and config.max_length is None:
        raise ValueError("packing fills rows of max_length tokens: give max_length.")
    if config.train_sampling_strategy not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy is '{config.train_sampling_strategy}', an order that --resume cannot restore: "
            "give random or sequential; packing saves the padding, too."
        )
    if config.save_strategy == "best":
        raise ValueError("save_strategy is 'best', and there is no evaluation loss: give steps, epoch or no.")
    if config.activation_offloading and not torch.cuda.is_available():
        raise ValueError("activation_offloading needs a GPU, and there is none: leave it out.")
    if config.neftune_noise_alpha and recipe.grid.y > 1:
        raise ValueError(
            f"neftune_noise_alpha adds noise to whole embeddings, and tp_size {recipe.grid} splits them: give tp_size "
            f"{int(recipe.grid)}, or leave the noise out."
        )
    if config.optim == OptimizerNames.ADAFACTOR and recipe.is_sharded:
        raise ValueError("optim is 'adafactor', which cannot step on sharded weights: give adamw_torch, for example.")
    _check_mappings(config)
    _check_batches(config.accelerator_config)
    _check_optimizer(config)
    if recipe.distills:
        _check_losses(config)


def check_launcher() -> None:
    """Raise ValueError if `accelerate launch` was told to shard the model: the original would be left out of it."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        if os.environ.get(name, "false").lower() == "true":
            raise ValueError(
                f"accelerate's config shards the model ({name}), and {ONE_WAY_TO_SHARD}: launch with one of "
                "recipes/accelerate, and give these."
            )


def check_devices(stage: Stage, ranks: int) -> None:
    """Raise ValueError if `stage` cannot be trained on the devices of this process, or on as many `ranks` as were
    launched."""
    recipe, gpus = stage.recipe, stage.config.n_gpu
    if gpus > 1:
        raise ValueError(
            f"One process sees {gpus} GPUs: launch one for each, by torchrun --nproc-per-node {gpus} -m rewired.adapt "
            "RECIPE, or let it see a single one by CUDA_VISIBLE_DEVICES=0."
        )
    if recipe.tp_size > 1 and stage.config.device.type == "cpu":
        raise ValueError("tp_size needs GPUs, since accelerate lets no CPUs share a layer: leave it out here.")
    if stage.config.fp16 and stage.config.device.type == "cpu":
        raise ValueError("fp16 needs a GPU, and there is none: give bf16, or leave it out.")
    if recipe.is_sharded and recipe.ranks != ranks:
        raise ValueError(
            f"fsdp_size, dp_replicate_size and tp_size make {recipe.ranks} ranks, and there are {ranks}: launch "
            f"{recipe.ranks}, for example by torchrun --nproc-per-node {recipe.ranks} -m rewired.adapt RECIPE."
        )


def _check_numbers(config: SFTConfig) -> None:
    for name in _COUNTS:
        value = getattr(config, name)
        if value is not None and not 0 < value < 2**31:
            raise ValueError(f"{name} is {value}: give one above 0 and below 2**31.")
    if config.max_steps < 1 and config.max_steps != -1:
        raise ValueError(f"max_steps is {config.max_steps}: give one above 0, or leave it out.")
    if config.weight_decay < 0:
        raise ValueError(f"weight_decay is {config.weight_decay}: give 0 or more.")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed is {config.seed}: give one from 0 to 2**32 - 1.")
    if config.eval_steps and config.eval_steps < 1:
        raise ValueError(f"eval_steps is {config.eval_steps}: give a number of whole steps.")


def _check_mappings(config: SFTConfig) -> None:
    for name in ("model_init_kwargs", "lr_scheduler_kwargs", "activation_checkpointing_kwargs"):
        if isinstance(getattr(config, name), str):
            raise ValueError(f"{name} is '{getattr(config, name)}': give a mapping.")
    options: Any = config.activation_checkpointing_kwargs or {}
    if options.get("use_reentrant"):
        raise ValueError("use_reentrant: a rewired layer passes on more than one tensor, so leave it out.")
    if "quantization_config" in (config.model_init_kwargs or {}):
        raise ValueError("model_init_kwargs: quantization_config is not for adapt: give load_in_4bit.")
    _check_dtype(config.model_init_kwargs or {})


def _check_batches(options: Any) -> None:
    for name in ("dispatch_batches", "split_batches", "gradient_accumulation_kwargs"):
        if getattr(options, name):
            raise ValueError(f"accelerator_config: {name} would change how many rows are read at once: leave it out.")


def _check_dtype(options: Any) -> None:
    if "torch_dtype" in options:
        raise ValueError("model_init_kwargs: torch_dtype is called dtype now.")
    dtype = str(options.get("dtype", "auto")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(f"model_init_kwargs: dtype is '{dtype}': choose {', '.join(_DTYPES)}.")


def _check_optimizer(config: SFTConfig) -> None:
    """Try to make the optimizer and the scheduler, for a parameter that is not trained."""
    if config.lr_scheduler_type == SchedulerType.CONSTANT and config.warmup_steps:
        raise ValueError(
            "lr_scheduler_type is 'constant', which has no warm-up: give constant_with_warmup, or warmup_steps: 0."
        )
    name = "optim"
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(config)
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **options)
        name = "lr_scheduler_type"
        steps = {"num_warmup_steps": 1, "num_training_steps": 2}
        scheduler_options: Any = config.lr_scheduler_kwargs
        get_scheduler(config.lr_scheduler_type, optimizer, **steps, scheduler_specific_kwargs=scheduler_options)
    except (ImportError, TypeError, ValueError) as error:
        value = getattr(getattr(config, name), "value", None)
        raise ValueError(f"{name} is '{value}': {str(error).strip().splitlines()[0]}") from None


def _check_losses(config: SFTConfig) -> None:
    for name, default in {"loss_type": "nll", "label_smoothing_factor": 0, "neftune_noise_alpha": None}.items():
        if getattr(config, name) != default:
            raise ValueError(f"{name} is not part of the losses against the original: leave it out.")
