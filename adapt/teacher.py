"""The original model as the student's teacher, at the price of the weights that differ.

The original is the student's own checkpoint with every layer standard. Below the first layer that is rewired or trained
both compute the same, so it is computed once. Above it the teacher runs on the student's own modules where those are
frozen and still the original's, and has weights of its own elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaModel

from rewired.convert.checkpoint import Checkpoint
from rewired.modeling_rewired_llama import RewiredLlamaForCausalLM

from .trainable import first_changed, is_trained

_EMBEDDING = "model.embed_tokens"


class Teacher:
    """The original of `student`.

    `original` is the folder of its checkpoint. From the start, the student's layers in `changed` have other weights,
    and with `ends_changed` so may its embedding, last norm and head. `without_adapters` makes a context in which LoRA
    is off. `shares` is False where the student's modules are sharded, and no use outside of it. With `whole`, it runs
    all layers itself. Weights of its own are held in `dtype` on `device`, where the student will be.
    """

    def __init__(
        self,
        student: RewiredLlamaForCausalLM,
        original: Path,
        changed: Collection[int] = (),
        ends_changed: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        shares: bool = True,
        whole: bool = False,
        without_adapters: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.first = -1 if ends_changed or whole else first_changed(student)
        self.without_adapters = without_adapters
        self._tensors = {name: original / info.file for name, info in Checkpoint.open(original).tensors().items()}
        self._dtype, self._device, self._shares = dtype or student.dtype, device or student.device, shares
        config = deepcopy(student.config)
        start = max(self.first, 0)
        config.num_hidden_layers -= start
        with torch.device("meta"):
            model: Any = LlamaModel(config)
            head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        model.rotary_emb = student.model.rotary_emb
        model.norm = self._part(model.norm, student.model.norm, "model.norm", not ends_changed)
        model.embed_tokens = (
            self._part(model.embed_tokens, student.model.embed_tokens, _EMBEDDING, not ends_changed)
            if self.first < 0
            else None
        )
        name = _EMBEDDING if config.tie_word_embeddings else "lm_head"
        self.head = self._part(head, student.lm_head, name, not ends_changed)
        for offset, layer in enumerate(model.layers):
            index = start + offset
            theirs: nn.Module = student.model.layers[index]
            parts = [name for name, part in layer.named_modules() if part._parameters]
            for name in parts:
                pair = layer.get_submodule(name), theirs.get_submodule(name)
                layer.set_submodule(name, self._part(*pair, f"model.layers.{index}.{name}", index not in changed))
        self.model = model.eval()

    @torch.no_grad()
    def __call__(self, trunk: torch.Tensor | None, **inputs: Any) -> Any:
        """LlamaModel's outputs from `trunk`, the stream before layer `first`, [B, T, H]; from tokens where that is -1.

        `inputs` are the student's.
        """
        if trunk is not None:
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": trunk}
        with self.without_adapters():
            return self.model(**inputs)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that it computes with, the student's own among them."""
        return [*self.model.parameters(), *self.head.parameters()]

    def _part(self, mine: nn.Module, theirs: nn.Module, name: str, may_share: bool) -> nn.Module:
        """The student's module where it is frozen and the original's; else `mine`, filled from the checkpoint."""
        is_original = not is_trained(getattr(theirs, "base_layer", theirs))
        if self._shares and may_share and is_original:
            return theirs
        tensors = {key: self._read(f"{name}.{key}") for key in mine.state_dict()}
        mine.load_state_dict(tensors, assign=True)
        return mine.requires_grad_(False)

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._tensors[name], framework="pt") as file:
            return file.get_tensor(name).to(self._device, self._dtype)
