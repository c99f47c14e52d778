"""The memory of one rank: weights, and the cache of keys and values."""

from __future__ import annotations

from rewired.checkpoint.llama import LlamaShape

from .machine import Load
from .shapes import attention_weights, head_weights, mlp_weights

_ITEM = 2  # bytes of a 16-bit number
USABLE = 0.9  # of a GPU's memory; the rest is for activations and the runtime


def weight_bytes(shape: LlamaShape, tp: int) -> float:
    """Embeddings are whole on every rank; layers and head are shared."""
    layers = shape.num_hidden_layers * (attention_weights(shape) + mlp_weights(shape))
    head = 0 if shape.tie_word_embeddings else head_weights(shape)
    return _ITEM * ((layers + head) / tp + head_weights(shape))


def cache_bytes(shape: LlamaShape, tp: int, load: Load) -> float:
    """Of all sequences at the end of the generation."""
    positions = load.batch * (load.prompt + load.new)
    heads = shape.num_key_value_heads / tp
    return 2 * _ITEM * shape.num_hidden_layers * positions * heads * shape.head_dim
