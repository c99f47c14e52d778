"""What a training would do: its recipe, tokens, steps and memory, without a weight being read."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from transformers import Trainer

from rewired.model.configuration_rewired_llama import RewiredLlamaConfig
from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.sources import find_source

from . import begun
from .inputs import inputs
from .recipe.choices import LORA
from .recipe.keys import Recipe, Stage
from .start import changed_before
from .steps import Steps
from .trainable import first_changed, rewired_layers

_GB = 1e9
_SAMPLE = 4096  # parameters that an optimizer is tried on


def describe(stages: Sequence[Stage], title: str, resume: bool = False) -> str:
    """The last of `stages`, for a terminal. Raises ValueError for what `adapt` would refuse, launched on as many ranks
    as the recipe says."""
    stage = stages[-1]
    begun.check_free(Path(str(stage.config.output_dir)), resume)
    with tempfile.TemporaryDirectory(prefix="rewired-") as scratch:
        given = inputs(stages, find_source(stages[0].recipe.model).tokenizer(Path(scratch)), elsewhere=True)
    steps = Steps.of(stage.recipe, stage.config, given.data.train)
    lines = [title] if title else []
    lines += [yaml.safe_dump(stage.given, sort_keys=False).strip(), "", *given.data.notes, steps.told()]
    return "\n".join([*lines, _trained(stage.recipe, given.student), _memory(stage, given.student)])


def _trained(recipe: Recipe, model: RewiredLlamaForCausalLM) -> str:
    layers = rewired_layers(model.config)
    what = "everything" if recipe.train == "all" else f"{recipe.train.replace('_', ' ')} of layers {_spans(layers)}"
    if recipe.train == LORA:
        what = f"LoRA on layers {_spans(layers or list(range(model.config.num_hidden_layers)))}"
    return f"Trained: {what}, {_count(model, is_trained=True):,} of {_count(model):,} parameters."


def _memory(stage: Stage, model: RewiredLlamaForCausalLM) -> str:
    """What one device holds."""
    recipe, config = stage.recipe, stage.config
    dtype = _dtype(config)
    split = recipe.fsdp_size * recipe.tp_size
    weights, trained = _count(model) // split, _count(model, is_trained=True) // split
    parts = {
        "weights": weights * dtype.itemsize,
        "gradients": trained * dtype.itemsize,
        "optimizer": trained * _optimizer_bytes(config, dtype),
        "teacher": _teacher_bytes(recipe, config, model),
    }
    told = ", ".join(f"{name} {size / _GB:.2f} GB" for name, size in parts.items())
    more = "each layer while it is gathered" if recipe.is_sharded else "under DDP the gradients once more"
    return f"Memory of a device: {told}; activations come on top, and {more}."


def _dtype(config: Any) -> torch.dtype:
    """The student's; `auto` is what most checkpoints are in."""
    name = str((config.model_init_kwargs or {}).get("dtype", "float32")).removeprefix("torch.")
    found: torch.dtype = getattr(torch, "bfloat16" if name == "auto" else name)
    return found


def _optimizer_bytes(config: Any, dtype: torch.dtype) -> float:
    """What the optimizer keeps of a parameter, after a step of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameter = torch.nn.Parameter(torch.zeros(_SAMPLE // 64, 64, dtype=dtype, device=device))
    kind, options = Trainer.get_optimizer_cls_and_kwargs(config)
    optimizer = kind([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in kept) / _SAMPLE


def _teacher_bytes(recipe: Recipe, config: Any, model: RewiredLlamaForCausalLM) -> int:
    """What one device holds of the original beside the student's."""
    if not (recipe.distills or config.eval_steps):
        return 0
    changed, ends_changed = changed_before(cast(RewiredLlamaConfig, model.config))
    first = -1 if ends_changed or recipe.align else first_changed(model, changed)
    embedding = [model.model.embed_tokens] if first < 0 or recipe.is_sharded else []
    parts = [(torch.nn.ModuleList([model.model.norm, model.lm_head, *embedding]), ends_changed)]
    parts += [(layer, n in changed) for n, layer in enumerate(model.model.layers) if n >= first]
    # sharded, it shares nothing
    own = [parameter for part, is_changed in parts for parameter in _own(part, is_changed or recipe.is_sharded)]
    dtype = _dtype(config)
    rounded = torch.bfloat16 if config.bf16 else dtype
    # gains and the embedding, whose dtype is that of the stream
    exact = [one for one in own if one.dim() == 1 or any(one is part.weight for part in embedding)]
    size = sum(map(torch.nn.Parameter.numel, own)) * rounded.itemsize
    size += sum(map(torch.nn.Parameter.numel, exact)) * (dtype.itemsize - rounded.itemsize)
    return size if recipe.align else size // (recipe.fsdp_size * recipe.tp_size)


def _own(module: torch.nn.Module, is_changed: bool) -> list[torch.nn.Parameter]:
    """What the teacher has for itself: parameters that are not the original's, or will not be."""
    parameters = [parameter for name, parameter in module.named_parameters() if "lora_" not in name]
    return [parameter for parameter in parameters if is_changed or parameter.requires_grad]


def _count(module: torch.nn.Module, is_trained: bool = False) -> int:
    """Its parameters; LoRA's only where what is trained is asked for."""
    return sum(
        parameter.numel()
        for name, parameter in module.named_parameters()
        if (parameter.requires_grad if is_trained else "lora_" not in name)
    )


def _spans(layers: list[int]) -> str:
    """[1, 2, 3, 7] as 1-4, 7-8."""
    starts = [index for index in layers if index - 1 not in layers]
    ends = [index + 1 for index in layers if index + 1 not in layers]
    return ", ".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True)) or "none"
