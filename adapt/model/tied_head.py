"""A head tied to the embedding in a sharded model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from .lora import whole


def tie(model: Any, in_fsdp: bool) -> None:
    """Let a sharded `model` train, and save, its head as the embedding that it is.

    Where FSDP2 shards it, transformers leaves the head the weight of a step before.
    """
    if in_fsdp:
        model.set_output_embeddings(TiedHead(model.get_input_embeddings()))
    model.register_state_dict_post_hook(_with_head)


class TiedHead(nn.Module):
    """A head that reads the embedding's weight, which FSDP2 gathers anew for each step, whole."""

    bias = None

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that it is no submodule

    @property
    def weight(self) -> torch.Tensor:
        return self._embedding[0].weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From [..., H] to [..., V]."""
        return linear(hidden_states, whole(self.weight))


def _with_head(model: Any, tensors: dict[str, Any], *_: Any) -> None:
    """Add the head under its own name, as checkpoints have it, in a copy: safetensors stores no tensor twice."""
    family = model.family
    tensors[f"{family.head}.weight"] = tensors[f"{family.in_base(family.embedding)}.weight"].clone()
