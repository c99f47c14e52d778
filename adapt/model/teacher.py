"""The teacher: the original model, which costs memory only for the weights that differ from the student's.

The original is the student's own checkpoint with every layer standard. Below the first layer that is rewired or trained
both compute the same, so it is computed once. Above it the teacher runs on the student's own modules where those are
frozen and still the original's, and has weights of its own elsewhere (`beside`). Where the recipe has the student
sharded at load time, so is its teacher, which then shares no weights with it (`sharded`), or all (shared_teacher.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.distributed import DistributedConfig

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.tensors import read_tensor
from rewired.families import classes, stock
from rewired.model.rewired_model import RewiredForCausalLM

from .four_bit import In4Bit, keep_packing
from .trainable import UNCHANGED, Changed, first_changed, is_trained


@dataclass(frozen=True)
class Teacher:
    """The original of a student: its layers from `first` on, or all of them and the embedding if `first` is -1.

    `as_original` makes a context in which the modules that it shares with the student are the original's.
    """

    model: Any
    head: nn.Module
    first: int
    as_original: Callable[[], AbstractContextManager[None]] = nullcontext

    @torch.no_grad()
    def __call__(self, trunk: torch.Tensor | None, **inputs: Any) -> Any:
        """The stock model's outputs for the student's `inputs`.

        `trunk` is the stream before layer `first`, [B, T, H], which the student computed; None if `first` is -1.
        """
        if trunk is not None:
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": trunk}
        with self.as_original():
            return self.model(**inputs)


def beside(
    student: RewiredForCausalLM,
    original: Path,
    changed: Changed = UNCHANGED,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    without_adapters: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Teacher:
    """A teacher that runs on the student's own modules where they are the original's; others are read from the
    checkpoint in `original`.

    What is `changed` starts with other weights than the original's. The teacher's own projections are held in `dtype`,
    on `device`, where the student will be.
    """
    first = first_changed(student, changed)
    files = {name: original / info.file for name, info in Checkpoint.open(original).tensors().items()}
    family, base, start = student.family, student.base, max(first, 0)
    embedded: Any = student.get_input_embeddings()
    parts = _Parts(files, dtype or student.dtype, embedded.weight.dtype, device or student.device)
    config = without_layers(student.config, start)
    with torch.device("meta"):
        model: Any = stock(family, "Model")(config)
        head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    model.rotary_emb = base.rotary_emb
    for name in (family.last_norm, family.embedding):
        pair = getattr(model, name), getattr(base, name)
        is_read = name == family.last_norm or first < 0
        setattr(model, name, parts.take(*pair, family.in_base(name), not changed.ends) if is_read else None)
    embedding = getattr(model, family.embedding)
    name = family.in_base(family.embedding) if config.tie_word_embeddings else family.head
    head = parts.take(head, student.get_output_embeddings(), name, not changed.ends)
    if config.tie_word_embeddings and embedding is not None:
        head.weight = embedding.weight
    for index, layer in enumerate(getattr(model, family.layers), start):
        student_layer: nn.Module = base.decoder_layers[index]
        for name in [name for name, part in layer.named_modules() if part._parameters]:
            pair = layer.get_submodule(name), student_layer.get_submodule(name)
            layer.set_submodule(name, parts.take(*pair, f"{family.layer(index)}.{name}", index not in changed.layers))
    return Teacher(model.eval(), head, first, without_adapters)


def without_layers(config: Any, count: int) -> Any:
    """A copy of `config` for a model that lacks the first `count` layers; stock models count layers from 0."""
    cut = deepcopy(config)
    layers = cut.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers and name != "wiring":  # a setting of each layer
            setattr(cut, name, value[count:])
    cut.num_hidden_layers = layers - count
    return cut


def sharded(
    student: RewiredForCausalLM,
    original: Path,
    changed: Changed = UNCHANGED,
    dtype: torch.dtype | None = None,
    distributed: DistributedConfig | None = None,
    in_4bit: bool = False,
) -> Teacher:
    """A teacher that is sharded over the ranks as the student is: each rank reads and holds only its part.

    Its projections may be held `in_4bit`. Transformers leaves the last norm and the head gathered once they have run.
    """
    first = first_changed(student, changed)
    config = deepcopy(student.config)
    config.wiring = []
    model_class = classes(student.family, "ForCausalLM")
    if dtype not in (None, student.dtype):
        model_class = _in_low_precision(model_class)
    if in_4bit:
        model_class = type(f"{model_class.__name__}In4Bit", (In4Bit, model_class), {})
    model: Any = model_class.from_pretrained(
        original, config=config, dtype=dtype or student.dtype, distributed_config=distributed
    )
    model.requires_grad_(False).eval()
    base, family = model.base, student.family
    setattr(base, family.layers, base.decoder_layers[max(first, 0) :])
    base.config = without_layers(config, max(first, 0))
    model.forward = base.__call__  # called through the model, where FSDP prepares it
    return Teacher(model, model.get_output_embeddings(), first)


def _in_low_precision(student: type[RewiredForCausalLM]) -> type[RewiredForCausalLM]:
    """The class of a teacher in 16 bits, except for what stays float32 in a student under autocast."""
    family = student.family
    kept = {family.embedding, family.last_norm, *family.norms}
    return type(f"{student.__name__}InLowPrecision", (student,), {"_keep_in_fp32_modules_strict": kept})


@dataclass(frozen=True)
class _Parts:
    """The modules that a teacher is built from: the student's, or new ones with the original's weights."""

    files: Mapping[str, Path]  # of the original's tensors
    dtype: torch.dtype  # of projections
    stream_dtype: torch.dtype  # the student's embedding's: autocast leaves it, and norms, as they are
    device: torch.device

    def take(self, empty: nn.Module, student_module: nn.Module, name: str, may_share: bool) -> nn.Module:
        """The student's module if it is frozen and the original's; else `empty`, filled from the checkpoint."""
        base: Any = getattr(student_module, "base_layer", student_module)
        if may_share and not is_trained(base):
            return student_module
        dtype = self.dtype if isinstance(empty, nn.Linear) else self.stream_dtype
        names = {key: f"{name}.{key}" for key in empty.state_dict()}
        tensors = {key: read_tensor(self.files[name], name).to(self.device, dtype) for key, name in names.items()}
        if isinstance(empty, nn.Linear) and hasattr(base.weight, "quant_state"):
            return _in_4bit(empty, tensors, base.weight).to(self.device)
        empty.load_state_dict(tensors, assign=True)
        return empty.requires_grad_(False)


def _in_4bit(empty: nn.Linear, tensors: Mapping[str, torch.Tensor], like: Any) -> nn.Module:
    """A projection with these tensors that is held as the weight `like` is, once it is on its device."""
    from bitsandbytes.nn import Linear4bit

    made = Linear4bit(
        empty.in_features,
        empty.out_features,
        "bias" in tensors,
        compute_dtype=tensors["weight"].dtype,
        compress_statistics=like.compress_statistics,
        quant_type=like.quant_type,
    )
    made.load_state_dict(dict(tensors))
    keep_packing(made)
    return made.requires_grad_(False)
