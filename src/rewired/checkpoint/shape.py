"""The shape of a model, read from its `config.json` without transformers: sizes, tensors, memory,
and the wiring it has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rewired.families import family_of, names, why_not
from rewired.model.family import Family, Linear, Module, Width, size
from rewired.model.version import check_version
from rewired.model.wiring import Wiring

from .records import switch

_ITEM = 2  # bytes of a 16-bit number
USABLE = 0.9  # of a GPU's memory; the rest is for activations and the runtime


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, under the names of its config."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    biases: frozenset[Linear]  # projections that have one

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Shape:
        """Raises ValueError for another kind of model, or sizes that are missing or no numbers."""
        family = family_in(config)
        hidden_size, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        return cls(
            family=family,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            num_hidden_layers=_layers(config),
            intermediate_size=_size(config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=_size(config, "num_key_value_heads", default=heads),
            head_dim=_size(config, "head_dim", default=family.head_dim or hidden_size // heads),
            tie_word_embeddings=switch(config, "tie_word_embeddings"),
            biases=frozenset(
                linear
                for module in family.modules
                for linear in module.linears
                if linear.bias is True or (linear.bias and switch(config, linear.bias))
            ),
        )

    def config(self) -> dict[str, Any]:
        """The entries of a stock model's config that say this shape."""
        ours = ("family", "biases")
        switches = [linear.bias for linear in self.biases if isinstance(linear.bias, str)]
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ours}
        return {"model_type": self.family.model_type, **sizes, **dict.fromkeys(switches, True)}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the checkpoint must hold."""
        family = self.family
        embedding, hidden = (self.vocab_size, self.hidden_size), (self.hidden_size,)
        shapes: dict[str, tuple[int, ...]] = {f"{family.in_base(family.embedding)}.weight": embedding}
        for layer in range(self.num_hidden_layers):
            for module in family.modules:
                own = self._tensors_of(module)
                shapes |= {f"{family.layer(layer)}.{name}": shape for name, shape in own.items()}
        shapes[f"{family.in_base(family.last_norm)}.weight"] = hidden
        if not self.tie_word_embeddings:
            shapes[f"{family.head}.weight"] = embedding
        return shapes

    def _tensors_of(self, module: Module) -> dict[str, tuple[int, ...]]:
        """Those of a module and its norm, under their names in the layer."""
        shapes: dict[str, tuple[int, ...]] = {f"{module.norm}.weight": (self.hidden_size,)}
        for linear in module.linears:
            both = (self.size(linear.width), self.hidden_size)
            shape = both[::-1] if linear == module.writer else both
            shapes[f"{module.path}.{linear.name}.weight"] = shape
            if linear in self.biases:
                shapes[f"{module.path}.{linear.name}.bias"] = shape[:1]
        return shapes | {f"{module.path}.{name}.weight": (self.size(width),) for name, width in module.inside}

    def size(self, width: Width) -> int:
        return size(self, width)

    def wiring(self, entries: Any) -> Wiring:
        """The wiring of this model that `entries` say in their JSON form. Raises ValueError."""
        return Wiring.from_json(entries, self.num_hidden_layers, self.hidden_size)

    def module_weights(self, module: Module) -> int:
        """How many weights the projections of a module have, in each layer."""
        return self.hidden_size * sum(self.size(linear.width) for linear in module.linears)

    @property
    def layer_weights(self) -> int:
        return sum(map(self.module_weights, self.family.modules))

    @property
    def head_weights(self) -> int:
        """How many weights turn the last stream into logits."""
        return self.vocab_size * self.hidden_size

    def for_shards(self, tp_shards: int) -> Shape:
        """This shape, with each KV head repeated where that lets `tp_shards` shards share them out, else as it is."""
        return replace(self, num_key_value_heads=self.family.kv_heads_for(self, tp_shards))

    def check_shards(self, tp_shards: int, name: str = "tp_shards") -> None:
        """Raises ValueError naming the size that `tp_shards`, which the user knows as `name`, does not divide."""
        self.family.check_shards(self, tp_shards, name)

    def default_shards(self) -> int:
        """8, a node's worth of GPUs, where it divides the heads, KV heads and MLP width; else the most that does."""
        return max(shards for shards in range(1, 9) if self.most_shards % shards == 0)

    @property
    def most_shards(self) -> int:
        """The most that divide the model; others do where they divide these."""
        return math.gcd(*self.family.divisible(self).values())


def weight_bytes(shape: Shape, tp: int, item: float = _ITEM) -> float:
    """Of one rank. Embeddings are whole on every rank; layers, whose numbers have `item` bytes, and head are shared."""
    head = 0 if shape.tie_word_embeddings else shape.head_weights
    layers = item * shape.num_hidden_layers * shape.layer_weights
    return (layers + _ITEM * head) / tp + _ITEM * shape.head_weights


def cache_bytes(shape: Shape, tp: int, tokens: int) -> float:
    """Of the keys and values of one rank, for so many `tokens` in all sequences."""
    return 2 * _ITEM * shape.num_hidden_layers * tokens * shape.num_key_value_heads / tp * shape.head_dim


def family_in(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's `config`. Raises ValueError for other families."""
    model_type = config.get("model_type")
    family = family_of(model_type)
    if family is None:
        raise ValueError(
            f"This is not a {names()} model: its config.json says model_type '{model_type}'{why_not(model_type)}."
        )
    architectures = config.get("architectures")
    given = architectures if isinstance(architectures, list) else [architectures] if architectures else []
    if given and not any(str(name).endswith("ForCausalLM") for name in given):
        raise ValueError(
            f"This is not a language model: its config.json says architectures {json.dumps(architectures)}, and only "
            f"{family.architecture} converts, not a model of rewards, classes or embeddings."
        )
    return family


def _layers(config: Mapping[str, Any]) -> int:
    layers, most = _size(config, "num_hidden_layers"), 10_000  # a broken number must not fill the memory
    if layers > most:
        raise ValueError(
            f"config.json has num_hidden_layers {layers}, more than any model's: it may be at most {most}."
        )
    return layers


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json has {name} {value!r}: it must be a positive integer.")
    return value


def source_wiring(config: Mapping[str, Any], shape: Shape) -> Wiring:
    """The wiring that a checkpoint already has: dense, or ours.

    Raises ValueError where the wiring is malformed, or of a version that is not computed here.
    """
    entries: Any = []
    if config["model_type"] == shape.family.rewired_type:
        check_version(config)
        entries = config.get("wiring")
    return shape.wiring(entries)
