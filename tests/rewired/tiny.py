"""Tiny Llamas with random weights, and the same ones rewired."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rewired.model.modeling_rewired_llama import RewiredLlamaConfig, RewiredLlamaForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # large enough that every wiring changes the logits visibly
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# one wiring of every kind, for six layers and four shards
WIRINGS: dict[str, list[dict[str, Any]]] = {
    "standard": [],
    "parallel": [{"layers": "1-5", "preset": "parallel"}],
    "ladder": [{"layers": "2-6", "preset": "ladder"}],
    "ladder-peek": [{"layers": "0-6", "preset": "ladder", "peek": True}],
    "desync-2x": [{"layers": "1-5", "preset": "desync", "every": 2}],
    "desync-4x-mean": [{"layers": "0-6", "preset": "desync", "every": 4, "merge": "mean"}],
    "partial": [{"layers": "1-6", "preset": "partial", "shared_fraction": 0.4}],
    "partial-mean-overlap": [
        {"layers": "0-5", "preset": "partial", "shared_fraction": 0.6, "merge": "mean", "overlap": True}
    ],
    "parallel-overlap-peek": [{"layers": "0-6", "preset": "parallel", "overlap": True, "peek": True}],
    "desync-3x-overlap": [{"layers": "0-5", "preset": "desync", "every": 3, "overlap": True}],
    "delay-2-peek": [{"layers": "0-5", "preset": "standard", "delay": 2, "peek": True}],
    "late-mixed": [
        {"layers": "0-2", "preset": "partial", "shared_fraction": 0.5, "delay": 2},
        {"layers": "2-4:mlp", "preset": "ladder", "delay": 2, "peek": True},
        {"layers": "2-4:attn", "preset": "ladder"},
        {"layers": "4-6", "preset": "desync", "every": 2, "delay": 2},
    ],
    "mixed": [
        {"layers": "0-2:attn", "preset": "ladder", "peek": True},
        {"layers": "0-1:mlp,2-4", "preset": "partial", "shared_fraction": 0.5},
        {"layers": "4-6", "preset": "parallel", "overlap": True},
    ],
}

# payloads of every kind; in float64, where no rounding to a whole number hangs on how a sum is ordered
PAYLOADS: dict[str, list[dict[str, Any]]] = {
    "standard-int8": [{"layers": "0-6", "preset": "standard", "payload": "int8"}],
    "ladder-int6": [{"layers": "0-4", "preset": "ladder", "payload": "int6"}],
    "ladder-peek-int4": [{"layers": "1-6", "preset": "ladder", "peek": True, "payload": "int4"}],
    "desync-int8": [{"layers": "0-5", "preset": "desync", "every": 3, "overlap": True, "payload": "int8"}],
    "partial-int4": [{"layers": "1-6", "preset": "partial", "shared_fraction": 0.6, "payload": "int4"}],
    "desync-mean-int4": [{"layers": "0-6", "preset": "desync", "every": 2, "merge": "mean", "payload": "int4/int8"}],
    "delay-2-int8": [{"layers": "1-5", "preset": "ladder", "peek": True, "delay": 2, "payload": "int8"}],
    # an attention takes what MLPs left before what rounding left of their sums has come back
    "delay-2-between": [
        {"layers": "0-4:mlp", "preset": "ladder", "delay": 2, "payload": {8: 0.6, 0: 0.4}},
        {"layers": "0-4:attn", "preset": "ladder", "peek": True},
    ],
    "table": [
        {"layers": "0-3", "preset": "ladder", "peek": True, "payload": {8: 0.25, "4/8": 0.35, 0: 0.4}},
        {"layers": "3-6:mlp", "preset": "standard", "peek": True, "payload": {8: 0.5, 4: 0.5}},
    ],
}


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**(SIZES | changes))


def rewired_config(wiring: list[dict[str, Any]], tp_shards: int = 4, **changes: Any) -> RewiredLlamaConfig:
    return RewiredLlamaConfig(**(SIZES | changes), wiring=wiring, tp_shards=tp_shards)


def rewired_model(
    wiring: list[dict[str, Any]], tp_shards: int = 4, random_gains: bool = True, **changes: Any
) -> RewiredLlamaForCausalLM:
    """A rewired Llama with random weights, in eval mode; gains random too, so that they cannot be forgotten."""
    model = RewiredLlamaForCausalLM(rewired_config(wiring, tp_shards, **changes)).eval()
    if random_gains:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("_gain.weight"):
                    parameter.uniform_(0.5, 1.5)
    return model


def stock_twin(model: RewiredLlamaForCausalLM) -> LlamaForCausalLM:
    """Stock Llama with the same weights."""
    config = model.config.to_dict()
    for name in ("wiring", "wiring_version", "tp_shards", "model_type", "auto_map", "architectures", "pretraining_tp"):
        config.pop(name, None)
    twin = LlamaForCausalLM(LlamaConfig(**config)).to(model.dtype).eval()
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_gain.weight")}
    twin.load_state_dict(weights)
    return twin


def tokens(batch: int = 2, length: int = 9, vocab_size: int = SIZES["vocab_size"]) -> torch.Tensor:
    return torch.randint(2, vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
