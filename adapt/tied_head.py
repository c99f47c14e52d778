"""A head that is the embedding, in a model that FSDP shards: what transformers leaves there is a step behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear


def tie(model: Any) -> None:
    """Let the head of a sharded `model` be its embedding in every step."""
    model.lm_head = TiedHead(model.model.embed_tokens)
    model.register_state_dict_post_hook(_with_head)


class TiedHead(nn.Module):
    """A head that has the embedding's weight: FSDP makes that whole for each step, and leaves `lm_head` the one of the
    step before."""

    bias = None

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # which is no part of this module

    @property
    def weight(self) -> torch.Tensor:
        return self._embedding[0].weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From [..., H] to [..., V]."""
        return linear(hidden_states, self.weight)


def _with_head(model: Any, tensors: dict[str, Any], *_: Any) -> None:
    """A checkpoint has it under its own name; a file of safetensors does not hold one tensor under two."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
