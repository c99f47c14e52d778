"""What a training would do: its recipe, tokens, steps and memory, without a weight being read."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from transformers import AutoTokenizer

from rewired.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.sources import find_source

from . import corpus
from .recipe import LORA, Recipe, Stage
from .start import RECORD, outline
from .tokens import check_padding, set_chat_template
from .trainable import rewired_layers

_FLOAT = 4  # bytes; AdamW has two moments


def describe(stages: Sequence[Stage], title: str) -> str:
    """The last of `stages`, for a terminal. Raises ValueError for what `adapt` would refuse."""
    stage, first = stages[-1], stages[0]
    recipe, config = stage.recipe, stage.config
    model = outline([one.recipe for one in stages])
    with tempfile.TemporaryDirectory(prefix="rewired-") as scratch:
        tokenizer = AutoTokenizer.from_pretrained(find_source(first.recipe.model).tokenizer(Path(scratch)))
        set_chat_template(tokenizer, config)
        check_padding(tokenizer, config)
        data = corpus.load(recipe, config, tokenizer)
    lines = [title] if title else []
    lines += [yaml.safe_dump(stage.given, sort_keys=False).strip(), "", *data.notes]
    lines += [_steps(data, config), *_memory(recipe, config, model)]
    return "\n".join(lines)


def _steps(data: corpus.Corpus, config: Any) -> str:
    ranks = PartialState().num_processes
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * ranks
    if not hasattr(data.train, "__len__"):
        return f"{config.max_steps} steps of {batch} rows on {ranks} devices, streamed."
    rows = len(data.train)
    steps = config.max_steps if config.max_steps > 0 else math.ceil(math.ceil(rows / batch) * config.num_train_epochs)
    packed = ", fewer once they are packed" if config.packing else ""
    return f"{rows:,} rows to train on, {batch} a step on {ranks} devices: {steps:,} steps{packed}."


def _memory(recipe: Recipe, config: Any, model: RewiredLlamaForCausalLM) -> list[str]:
    """What is trained, and what one device holds of it, if nothing is sharded."""
    layers = rewired_layers(model.config)
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    of_layers = sum(
        parameter.numel()
        for index in layers
        for name, parameter in model.model.layers[index].named_parameters()
        if "lora_" not in name
    )
    what = "everything" if recipe.train == "all" else f"{recipe.train.replace('_', ' ')} of layers {_spans(layers)}"
    if recipe.train == LORA:
        what = f"LoRA on layers {_spans(layers or list(range(model.config.num_hidden_layers)))}"
    is_original = not any(getattr(model.config, key, None) for key in ("refit", RECORD))
    owned = {"all": total, "rewired": of_layers}.get(recipe.train, 0 if is_original else of_layers)
    parts = {
        "weights": total * _FLOAT,
        "gradients": trained * _FLOAT,
        "AdamW": trained * 2 * _FLOAT,
        "teacher": owned * (_FLOAT // 2 if config.bf16 else _FLOAT) * (recipe.distills or bool(config.eval_steps)),
    }
    told = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts.items())
    return [
        f"Trained: {what}, {trained:,} of {total:,} parameters.",
        f"Memory of a device, unless it is sharded: {told}; activations come on top.",
    ]


def _spans(layers: list[int]) -> str:
    """[1, 2, 3, 7] as 1-4, 7-8."""
    starts = [index for index in layers if index - 1 not in layers]
    ends = [index + 1 for index in layers if index + 1 not in layers]
    return ", ".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True)) or "none"
