"""A dry run: the tokens, steps and memory of a training, without a weight being read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import Trainer

from rewired import quantities
from rewired.checkpoint import provenance
from rewired.model.regions import ranges_of_layers
from rewired.model.rewired_model import RewiredForCausalLM

from .data.steps import TrainingSteps
from .model.four_bit import BLOCK
from .model.shared_teacher import runs_within
from .model.trainable import first_changed, rewired_layers
from .preflight import check_stage
from .recipe.keys import LORA, Recipe, Stage
from .scratch import tokenizer_of
from .trainer import run_manifest

_SAMPLE = 4096  # parameters that an optimizer is tried on
_IN_4BIT = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # bytes of a weight: NF4, a byte of scale for 64, four for 256 scales
_IN_4BIT_SHARDED = 1 / 2 + 4 / BLOCK  # whose scales are not quantised


def describe(stages: Sequence[Stage], title: str, resume: bool = False) -> str:
    """A description of the last of `stages`, for a terminal.

    Raises ValueError for what `adapt` would refuse when launched on as many ranks as the recipe says.
    """
    stage = stages[-1]
    run_manifest.check_free(Path(str(stage.config.output_dir)), resume)
    with tokenizer_of(stages[0].recipe) as tokenizer:
        checked = check_stage(stages, tokenizer, elsewhere=True)
    steps = TrainingSteps.of(stage.recipe, stage.config, checked.corpus.train)
    lines = [title] if title else []
    lines += [yaml.safe_dump(stage.given, sort_keys=False).strip(), "", *checked.corpus.notes, steps.describe()]
    return "\n".join([*lines, _parameters(stage.recipe, checked.student), _memory(stage, checked.student)])


def _parameters(recipe: Recipe, model: RewiredForCausalLM) -> str:
    layers = rewired_layers(model.config)
    which = "everything" if recipe.train == "all" else f"{recipe.train.replace('_', ' ')} of layers {_spans(layers)}"
    if recipe.train == LORA:
        which = f"LoRA, norms and gains of layers {_spans(layers or list(range(model.config.num_hidden_layers)))}"
    return f"Trained: {which}, {_count(model, is_trained=True):,} of {_count(model):,} parameters."


def _memory(stage: Stage, model: RewiredForCausalLM) -> str:
    recipe, config = stage.recipe, stage.config
    dtype = _dtype(config)
    split = recipe.fsdp_size * recipe.tp_size
    trained = _count(model, is_trained=True) // split
    of_trained = torch.float32 if recipe.train == LORA else dtype
    parts = {
        "weights": _weight_bytes(recipe, model, dtype) / split,
        "gradients": trained * of_trained.itemsize,
        "optimizer": trained * _optimizer_bytes(config, of_trained),
        "teacher": _teacher_bytes(recipe, config, model),
    }
    if recipe.cache_gathers:
        kept = model.base.decoder_layers[-recipe.cache_gathers :]
        gathered = sum(map(_count, kept)) * dtype.itemsize - _saved_by_4bit(recipe, kept, dtype)
        parts["cached gathers"] = gathered / recipe.tp_size * (1 - 1 / recipe.fsdp_size)
    for companion in stage.companions:
        parts |= companion.memory(recipe, model, dtype, parts["teacher"])
    sizes = ", ".join(f"{name} {quantities.size(size)}" for name, size in parts.items())
    more = "each layer while it is gathered" if recipe.is_sharded else "under DDP the gradients once more"
    return f"Memory of a device: {sizes}; activations come on top, and {more}."


def _weight_bytes(recipe: Recipe, model: RewiredForCausalLM, dtype: torch.dtype) -> float:
    saved = _saved_by_4bit(recipe, model.base.decoder_layers, dtype)
    adapters = sum(parameter.nbytes for name, parameter in model.named_parameters() if "lora_" in name)
    return _count(model) * dtype.itemsize - saved + adapters


def _saved_by_4bit(recipe: Recipe, layers: Iterable[nn.Module], dtype: torch.dtype) -> float:
    """Bytes that the projections of `layers` take less than in `dtype`."""
    if not recipe.load_in_4bit:
        return 0.0
    parts = (part for layer in layers for part in layer.named_modules())
    numbers = sum(part.weight.numel() for name, part in parts if isinstance(part, nn.Linear) and "lora_" not in name)
    return numbers * (dtype.itemsize - (_IN_4BIT_SHARDED if recipe.is_sharded else _IN_4BIT))


def _dtype(config: Any) -> torch.dtype:
    """The student's dtype; `auto` is taken for bfloat16, that of most checkpoints."""
    name = str((config.model_init_kwargs or {}).get("dtype", "float32")).removeprefix("torch.")
    dtype: torch.dtype = getattr(torch, "bfloat16" if name == "auto" else name)
    return dtype


def _optimizer_bytes(config: Any, dtype: torch.dtype) -> float:
    """Bytes of the optimizer's state for one parameter, measured after a step on a few."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameter = nn.Parameter(torch.zeros(_SAMPLE // 64, 64, dtype=dtype, device=device))
    kind, options = Trainer.get_optimizer_cls_and_kwargs(config)
    optimizer = kind([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(moment.nbytes for moment in moments) / _SAMPLE


def _teacher_bytes(recipe: Recipe, config: Any, model: RewiredForCausalLM) -> int:
    """Bytes on one device of the original's weights that are not the student's own."""
    if not (recipe.distills or config.eval_steps):
        return 0
    changed = provenance.changed(model.config.to_dict())
    first = first_changed(model, changed)
    is_apart = recipe.is_sharded and not runs_within(recipe, changed)
    embedding: list[Any] = [model.get_input_embeddings()] if first < 0 or is_apart else []
    ends = [model.base.last_norm, model.get_output_embeddings(), *embedding]
    parts = [(nn.ModuleList(ends), changed.ends or is_apart)]
    layers = enumerate(model.base.decoder_layers)
    parts += [(layer, is_apart or n in changed.layers) for n, layer in layers if n >= first]
    copies = [copy for part, is_copied in parts for copy in _copied(part, is_copied, model.family.gains)]
    dtype = _dtype(config)
    low_precision = torch.bfloat16 if config.bf16 else dtype
    # norms and the embedding, whose dtype is that of the stream
    in_full = [copy for copy in copies if copy.dim() == 1 or any(copy is part.weight for part in embedding)]
    size = sum(map(nn.Parameter.numel, copies)) * low_precision.itemsize
    size += sum(map(nn.Parameter.numel, in_full)) * (dtype.itemsize - low_precision.itemsize)
    size -= int(_saved_by_4bit(recipe, (layer for layer, is_copied in parts[1:] if is_copied), low_precision))
    return size // (recipe.fsdp_size * recipe.tp_size) if is_apart else size


def _copied(module: nn.Module, is_copied: bool, gains: Sequence[str]) -> list[nn.Parameter]:
    """The parameters of which the teacher has a copy of its own: those that are trained, or all if `is_copied`, but for
    the `gains`, which it lacks."""
    return [
        parameter
        for name, parameter in module.named_parameters()
        if (_is_the_models(name) if is_copied else parameter.requires_grad and "lora_" not in name)
        and not any(gain in name for gain in gains)
    ]


def _count(module: nn.Module, is_trained: bool = False) -> int:
    """The number of parameters, without those that PEFT adds; or of those that are trained."""
    return sum(
        parameter.numel()
        for name, parameter in module.named_parameters()
        if (parameter.requires_grad if is_trained else _is_the_models(name))
    )


def _is_the_models(name: str) -> bool:
    return "lora_" not in name and ".modules_to_save." not in name


def _spans(layers: list[int]) -> str:
    return ", ".join(map(str, ranges_of_layers(layers))) or "none"
