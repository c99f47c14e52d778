"""The shape of a Llama, read from its `config.json` without transformers: sizes, tensors, and the wiring it has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewired.model.layer_ranges import as_ranges
from rewired.model.version import check_version
from rewired.model.wiring import Wiring, check_shards

_MOST_LAYERS = 10_000  # a broken number must not fill the memory
DENSE, REWIRED, AUTHORS_LADDER = "llama", "rewired_llama", "llamaLadder"


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama, under the names of its config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LlamaShape:
        """Raises ValueError for another kind of model, a quantised one, or sizes that are missing or no numbers."""
        _check_kind(config)
        hidden_size, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        return cls(
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_hidden_layers=_size(config, "num_hidden_layers", most=_MOST_LAYERS),
            num_attention_heads=heads,
            num_key_value_heads=_size(config, "num_key_value_heads", default=heads),
            head_dim=_size(config, "head_dim", default=hidden_size // heads),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the checkpoint must hold."""
        hidden, mlp = self.hidden_size, self.intermediate_size
        q_out, kv_out = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = {"q_proj": (q_out, hidden), "k_proj": (kv_out, hidden), "v_proj": (kv_out, hidden)}
        attention["o_proj"] = (hidden, q_out)
        feed_forward = {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            shapes |= _linears(f"{prefix}.self_attn", attention, self.attention_bias)
            shapes |= _linears(f"{prefix}.mlp", feed_forward, self.mlp_bias)
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def wiring(self, entries: Any) -> Wiring:
        """The wiring of this model that `entries` say in their JSON form. Raises ValueError."""
        return Wiring.from_json(entries, self.num_hidden_layers, self.hidden_size)

    def check_shards(self, tp_shards: int, name: str = "tp_shards") -> None:
        """Raises ValueError naming the size that `tp_shards`, which the user knows as `name`, does not divide."""
        check_shards(
            tp_shards,
            name,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            intermediate_size=self.intermediate_size,
        )

    def default_shards(self) -> int:
        """8, a node's worth of GPUs, where it divides the heads, KV heads and MLP width; else the most that does."""
        common = math.gcd(self.num_attention_heads, self.num_key_value_heads, self.intermediate_size)
        return max(shards for shards in range(1, 9) if common % shards == 0)


def _linears(prefix: str, shapes: Mapping[str, tuple[int, int]], bias: bool) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
    if bias:
        tensors |= {f"{prefix}.{name}.bias": shape[:1] for name, shape in shapes.items()}
    return tensors


def _check_kind(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in (DENSE, REWIRED, AUTHORS_LADDER):
        raise ValueError(f"This is not a Llama: its config.json says model_type '{model_type}'. Only Llama converts.")
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures] if architectures else []
    if names and not any(str(name).endswith("ForCausalLM") for name in names):
        raise ValueError(
            f"This is no language model: its config.json says architectures {json.dumps(architectures)}, and only "
            "LlamaForCausalLM converts, not a reward model or a classifier."
        )
    if config.get("quantization_config"):
        raise ValueError(
            "This checkpoint is quantised (its config.json has a quantization_config): convert the original."
        )


def _size(config: Mapping[str, Any], name: str, default: int | None = None, most: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json has {name} {value!r}: it must be a positive integer.")
    if most is not None and value > most:
        raise ValueError(f"config.json has {name} {value}, more than any model's: it may be at most {most}.")
    return value


def source_wiring(config: Mapping[str, Any], shape: LlamaShape) -> Wiring:
    """The wiring that a checkpoint already has: dense, ours, or the Ladder paper's authors' own format.

    Raises ValueError where the wiring is malformed, or of a version that is not computed here.
    """
    entries: Any = []
    if config["model_type"] == REWIRED:
        check_version(config)
        entries = config.get("wiring")
    elif config["model_type"] == AUTHORS_LADDER:
        entries = _authors_ladder(config.get("ladder_layers"), shape.num_hidden_layers)
    return shape.wiring(entries)


def _authors_ladder(ladder_layers: Any, num_layers: int) -> list[dict[str, Any]]:
    """`ladder_layers` is an integer n for the last n layers, or the list of layers."""
    if type(ladder_layers) is int and 0 <= ladder_layers <= num_layers:
        spec = f"-{ladder_layers}" if ladder_layers else ""
    elif isinstance(ladder_layers, list) and all(type(layer) is int for layer in ladder_layers):
        modules = [2 * layer + offset for layer in ladder_layers for offset in (0, 1)]
        spec = ",".join(str(layer_range) for layer_range in as_ranges(modules))
    else:
        raise ValueError(
            f"config.json has ladder_layers {ladder_layers!r}: it must be a number of layers, at most {num_layers}, "
            "or a list of them."
        )
    return [{"layers": spec, "preset": "ladder"}] if spec else []
