"""The teacher of a sharded student whose frozen weights are the original's: the student's own layers, and no copy.

FSDP2 gathers a layer when that layer is called, so the original has to run in the student's layers. For its run they
are wired as the original's, without adapters, and with its norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.tensors import read_tensor
from rewired.families import stock
from rewired.model.wiring import Wiring

from ..recipe.keys import LORA, Recipe
from .teacher import Teacher, without_layers
from .trainable import UNCHANGED, Changed, first_changed, norms_and_gains


def runs_within(recipe: Recipe, changed: Changed) -> bool:
    """Whether the student of `recipe` is to be its own teacher; `changed` as in a `Start`.

    Where nothing is sharded, the teacher shares the student's modules one by one.
    """
    return recipe.is_sharded and recipe.train == LORA and changed == UNCHANGED


def within(student: Any, original: Path) -> Teacher:
    """A teacher that runs in a student with adapters, whose frozen weights are those of the checkpoint `original`."""
    first, base = first_changed(student), student.base
    swaps = [
        _Swap(base, student.family.layers, base.decoder_layers[first:]),
        _Swap(base, "config", without_layers(student.config, first)),
        *_standard(student),
        # PEFT's own switch would also say that they do not learn
        *(_Swap(module, "_disable_adapters", True) for module in base.modules() if isinstance(module, LoraLayer)),
        *_norms(student, original),
    ]
    return Teacher(base, student.get_output_embeddings(), first, partial(_swapped, base, swaps))


class _Swap(NamedTuple):
    """An attribute of `owner`, and its value while the original runs."""

    owner: Any
    name: str
    value: Any


@contextmanager
def _swapped(base: nn.Module, swaps: Sequence[_Swap]) -> Iterator[None]:
    """The context in which `base` is the original's, and does not train."""
    trains, before = base.training, [getattr(swap.owner, swap.name) for swap in swaps]
    base.eval()
    for owner, name, value in swaps:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(swaps, before, strict=True):
            setattr(owner, name, value)
        base.train(trains)


def _standard(student: Any) -> Iterator[_Swap]:
    """The wiring of the original."""
    config = student.config
    wirings = Wiring.dense(config.num_hidden_layers, config.hidden_size).layers
    for layer, of_layer in zip(student.base.decoder_layers, wirings, strict=True):
        yield _Swap(layer, "wirings", of_layer)
        for module, wiring in zip(student.family.modules, of_layer, strict=True):
            yield _Swap(layer.get_submodule(module.path), "wiring", wiring)


def _norms(student: Any, original: Path) -> Iterator[_Swap]:
    """The original's norms, where the student's learn. Each rank holds them whole."""
    files = Checkpoint.open(original).tensors()
    with torch.device("meta"):
        model: Any = stock(student.family, "ForCausalLM")(student.config)
    dtype = student.get_input_embeddings().weight.dtype  # of the stream
    for path in norms_and_gains(student):
        name = f"{path}.weight"
        if path.endswith(student.family.gains):
            continue
        norm = model.get_submodule(path)
        weight = read_tensor(original / files[name].file, name).to(student.device, dtype)
        norm.load_state_dict({"weight": weight}, assign=True)
        owner, _, attribute = path.rpartition(".")
        yield _Swap(student.get_submodule(owner), attribute, norm.requires_grad_(False))
