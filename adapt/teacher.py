"""The original model as the student's teacher, at the price of the weights that differ.

The original is the student's own checkpoint with every layer standard. Below the first layer that is rewired or trained
both compute the same, so it is computed once. Above it the teacher runs on the student's own modules where those are
frozen and still the original's, and has weights of its own elsewhere (`beside`). Where the recipe has the student
sharded at load time, so is its teacher, which then shares no weights with it (`sharded`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaModel
from transformers.distributed import DistributedConfig

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM

from .trainable import first_changed, is_trained

_EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class Teacher:
    """The original of a student; `model` has its layers from `first` on, all of them and the embedding where it is -1.

    `without_adapters` makes a context in which LoRA is off.
    """

    model: Any
    head: nn.Module
    first: int
    without_adapters: Callable[[], AbstractContextManager[None]] = nullcontext

    @torch.no_grad()
    def __call__(self, trunk: torch.Tensor | None, **inputs: Any) -> Any:
        """LlamaModel's outputs from `trunk`, the stream before layer `first`, [B, T, H]; from tokens where that is -1.

        `inputs` are the student's.
        """
        if trunk is not None:
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": trunk}
        with self.without_adapters():
            return self.model(**inputs)


def beside(
    student: RewiredLlamaForCausalLM,
    original: Path,
    changed: Collection[int] = (),
    ends_changed: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    shares: bool = True,
    whole: bool = False,
    without_adapters: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Teacher:
    """A teacher on the student's own modules, as far as they are the original's, whose checkpoint is in `original`.

    From the start, the student's layers in `changed` have other weights, and with `ends_changed` so may its embedding,
    last norm and head. `shares` is False where the student's modules are no use outside of it. With `whole`, the
    teacher runs all layers itself. Projections of its own are held in `dtype`, on `device`, where the student will be.
    """
    first = -1 if ends_changed or whole else first_changed(student, changed)
    files = {name: original / info.file for name, info in Checkpoint.open(original).tensors().items()}
    parts = _Parts(files, dtype or student.dtype, device or student.device, shares)
    config, start = deepcopy(student.config), max(first, 0)
    config.num_hidden_layers -= start
    with torch.device("meta"):
        model: Any = LlamaModel(config)
        head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    model.rotary_emb = student.model.rotary_emb
    model.norm = parts.take(model.norm, student.model.norm, "model.norm", not ends_changed)
    model.embed_tokens = (
        parts.take(model.embed_tokens, student.model.embed_tokens, _EMBEDDING, not ends_changed) if first < 0 else None
    )
    name = _EMBEDDING if config.tie_word_embeddings else "lm_head"
    head = parts.take(head, student.lm_head, name, not ends_changed)
    if config.tie_word_embeddings and model.embed_tokens is not None:
        head.weight = model.embed_tokens.weight
    for offset, layer in enumerate(model.layers):
        index = start + offset
        theirs: nn.Module = student.model.layers[index]
        for name in [name for name, part in layer.named_modules() if part._parameters]:
            pair = layer.get_submodule(name), theirs.get_submodule(name)
            layer.set_submodule(name, parts.take(*pair, f"model.layers.{index}.{name}", index not in changed))
    return Teacher(model.eval(), head, first, without_adapters)


def sharded(
    student: RewiredLlamaForCausalLM,
    original: Path,
    changed: Collection[int] = (),
    ends_changed: bool = False,
    dtype: torch.dtype | None = None,
    distributed: DistributedConfig | None = None,
) -> Teacher:
    """A teacher that is sharded over the ranks as the student is; each rank reads and holds its part only.

    Transformers leaves the last norm and the head whole once they have run.
    """
    first = -1 if ends_changed else first_changed(student, changed)
    config = deepcopy(student.config)
    config.wiring = []
    kind = type(student) if dtype in (None, student.dtype) else _Rounded
    model: Any = kind.from_pretrained(
        original, config=config, dtype=dtype or student.dtype, distributed_config=distributed
    )
    model.requires_grad_(False).eval()
    model.model.layers = model.model.layers[max(first, 0) :]
    model.model.config = deepcopy(config)
    model.model.config.num_hidden_layers -= max(first, 0)
    model.forward = model.model.forward  # called through the model, where FSDP prepares it
    return Teacher(model, model.lm_head, first)


class _Rounded(RewiredLlamaForCausalLM):
    """In 16 bits, but for what autocast leaves in the student's float32."""

    _keep_in_fp32_modules_strict = {"embed_tokens", "norm", "input_layernorm", "post_attention_layernorm"}


@dataclass(frozen=True)
class _Parts:
    """What a teacher is put together of."""

    files: Mapping[str, Path]  # of the original's tensors
    dtype: torch.dtype  # of projections
    device: torch.device
    shares: bool

    def take(self, mine: nn.Module, theirs: nn.Module, name: str, may_share: bool) -> nn.Module:
        """The student's module where it is frozen and the original's; else `mine`, filled from the checkpoint."""
        is_original = not is_trained(getattr(theirs, "base_layer", theirs))
        if self.shares and may_share and is_original:
            return theirs
        # what autocast leaves alone is in float32 where the student's is: the embedding's dtype is that of the stream
        dtype = self.dtype if isinstance(mine, nn.Linear) else cast(torch.Tensor, theirs.weight).dtype
        tensors = {key: self._read(f"{name}.{key}", dtype) for key in mine.state_dict()}
        mine.load_state_dict(tensors, assign=True)
        return mine.requires_grad_(False)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name).to(self.device, dtype)
