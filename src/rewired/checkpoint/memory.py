"""The memory of one rank: weights, and the cache of keys and values."""

from __future__ import annotations

from .shape import Shape

_ITEM = 2  # bytes of a 16-bit number
USABLE = 0.9  # of a GPU's memory; the rest is for activations and the runtime


def weight_bytes(shape: Shape, tp: int, item: float = _ITEM) -> float:
    """Embeddings are whole on every rank; layers, whose numbers have `item` bytes, and head are shared."""
    head = 0 if shape.tie_word_embeddings else shape.head_weights
    layers = item * shape.num_hidden_layers * shape.layer_weights
    return (layers + _ITEM * head) / tp + _ITEM * shape.head_weights


def cache_bytes(shape: Shape, tp: int, tokens: int) -> float:
    """Of so many `tokens` in all sequences."""
    return 2 * _ITEM * shape.num_hidden_layers * tokens * shape.num_key_value_heads / tp * shape.head_dim
