"""A family of models as data: the modules of its layers, and the tensors around them. Without torch.

Everything but this file and a family's own classes takes the names from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

HEADS = ("num_attention_heads", "head_dim")
KV_HEADS = ("num_key_value_heads", "head_dim")
NEURONS = ("intermediate_size",)
HEAD_DIM = ("head_dim",)
_IN_WORDS = {
    "num_attention_heads": "{} heads",
    "num_key_value_heads": "{} KV heads",
    "intermediate_size": "MLP width {}",
}

# What stands where a stock config wants a number that transformers reads no more: it refuses the file, and quotes this.
NOT_STOCK = (
    "This model is rewired, and a stock class would compute something else: load it with AutoModelForCausalLM after "
    "`import rewired`, or with trust_remote_code=True"
)

Width = tuple[str, ...]  # entries of a config, multiplied; shards share out the first


class Linear(NamedTuple):
    """A projection from the stream to `width`, or from there to the stream."""

    name: str
    width: Width
    bias: str | bool = False  # whether it has one, or the config's switch for that


class Replicated(NamedTuple):
    """A parameter inside a module that every shard holds whole, such as a norm of each head."""

    name: str
    width: Width


@dataclass(frozen=True)
class Module:
    """One of the two modules of a layer. It reads the stream through a norm, and writes to the stream."""

    path: str  # in the layer, as all names here
    norm: str
    gain: str  # that of its peeks, which is ours
    readers: tuple[Linear, ...]  # column-parallel
    writer: Linear  # row-parallel
    inside: tuple[Replicated, ...] = ()

    @property
    def is_attention(self) -> bool:
        return KV_HEADS in self.widths

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.readers, self.writer)

    @property
    def widths(self) -> dict[Width, None]:
        """Those of its projections, each once, in order."""
        return {linear.width: None for linear in self.linears}


@dataclass(frozen=True)
class Family:
    """Models whose layers are the same two modules, attention and then an MLP."""

    model_type: str  # of a stock checkpoint
    name: str  # as stock classes begin: `Llama` of `LlamaForCausalLM`
    modeling: str  # the Python module of the rewired classes, `RewiredLlamaConfig` and so on
    modules: tuple[Module, Module]
    base: str = "model"  # the model without its head, within the whole one
    layers: str = "layers"  # in the base
    embedding: str = "embed_tokens"  # in the base
    last_norm: str = "norm"  # in the base
    head: str = "lm_head"
    head_dim: int | None = None  # where a config does not name it, unless it is hidden_size / num_attention_heads
    unread: str | None = None  # an entry of stock configs that transformers checks to be a number, and never reads
    has_windows: bool = False  # whether a config may limit attention to a window of tokens

    @property
    def rewired_type(self) -> str:
        """The model_type of a rewired checkpoint."""
        return f"rewired_{self.model_type}"

    @property
    def architecture(self) -> str:
        return f"{self.name}ForCausalLM"

    @property
    def refusal(self) -> dict[str, str]:
        """What keeps a stock class from running a rewired checkpoint of this family; empty where nothing can."""
        return {self.unread: NOT_STOCK} if self.unread else {}

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of all projections of a layer."""
        return tuple(linear.name for module in self.modules for linear in module.linears)

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of a layer's norms, those inside its modules, too."""
        inside = (replicated.name for module in self.modules for replicated in module.inside)
        return (*(module.norm for module in self.modules), *inside)

    @property
    def gains(self) -> tuple[str, ...]:
        return tuple(module.gain for module in self.modules)

    def layer(self, index: int) -> str:
        """The path of a layer in the whole model."""
        return f"{self.base}.{self.layers}.{index}"

    def in_base(self, name: str) -> str:
        """The path in the whole model of what the base holds as `name`: `last_norm`, `embedding`."""
        return f"{self.base}.{name}"

    def window(self, config: Any, layer: int) -> int | None:
        """How many tokens the attention of a layer sees, itself included; None for all."""
        kinds = getattr(config, "layer_types", None)
        if not self.has_windows or (kinds is not None and kinds[layer] != "sliding_attention"):
            return None
        return getattr(config, "sliding_window", None)

    def divisible(self, config: Any) -> dict[str, int]:
        """The sizes of `config` that shards and ranks have to divide: heads, KV heads, the MLP's width."""
        widths = [width for module in self.modules for width in module.widths]
        return {width[0]: getattr(config, width[0]) for width in widths}

    def divisible_in_words(self, config: Any) -> str:
        """The same in words: `32 heads, 8 KV heads and MLP width 14336`."""
        *first, last = (_IN_WORDS[name].format(size) for name, size in self.divisible(config).items())
        return f"{', '.join(first)} and {last}"

    def check_shards(self, config: Any, shards: Any, name: str = "tp_shards") -> None:
        """Raise ValueError naming the first size that `shards`, which the user knows as `name`, does not divide."""
        if type(shards) is not int or shards < 1:
            raise ValueError(f"{name} is {shards!r}: it must be an integer of at least 1.")
        for size_name, size in self.divisible(config).items():
            if size % shards:
                copies = size_name == KV_HEADS[0] and self.kv_heads_for(config, shards) > size
                way = f", or copy KV heads: `convert SOURCE --tp-shards {shards}`" if copies else ""
                choice = divisors_in_words(math.gcd(*self.divisible(config).values()))
                raise ValueError(f"{name} {shards} does not divide {size_name} {size}: choose {choice}{way}.")

    def kv_heads_for(self, config: Any, shards: int) -> int:
        """How many KV heads a model for so many shards has: more than `config`, where copies of each let them share."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return (
            shards
            if type(shards) is int and shards > kv_heads and shards % kv_heads == heads % shards == 0
            else kv_heads
        )

    def check_ranks(self, config: Any, ranks: int, tp_shards: int | None, name: str = "tp_size") -> None:
        """Raise ValueError, naming the numbers, if `ranks` ranks, known as `name`, cannot hold equal parts of a model.

        Its function depends on `tp_shards` logical shards, or on none (None).
        """
        if tp_shards is not None and tp_shards % ranks:
            raise ValueError(
                f"{name} {ranks} does not divide tp_shards {tp_shards}: what this model computes depends on its "
                f"logical shards, and every rank must hold as many; choose a {name} that divides."
            )
        self.check_shards(config, ranks, name)


def divisors_in_words(number: int) -> str:
    """`1, 2, 3 or 6`."""
    *others, last = (str(each) for each in range(1, number + 1) if number % each == 0)
    return f"{', '.join(others)} or {last}" if others else last


def size(config: Any, width: Width) -> int:
    return math.prod(getattr(config, entry) for entry in width)


def usual_modules(
    reader_bias: str | bool = False,
    writer_bias: str | bool = False,
    mlp_bias: str | bool = False,
    inside_attention: tuple[Replicated, ...] = (),
) -> tuple[Module, Module]:
    """The modules of Llama and of families that call them alike, with their biases as in `Linear`."""
    return (
        Module(
            path="self_attn",
            norm="input_layernorm",
            gain="input_gain",
            readers=(
                Linear("q_proj", HEADS, reader_bias),
                Linear("k_proj", KV_HEADS, reader_bias),
                Linear("v_proj", KV_HEADS, reader_bias),
            ),
            writer=Linear("o_proj", HEADS, writer_bias),
            inside=inside_attention,
        ),
        Module(
            path="mlp",
            norm="post_attention_layernorm",
            gain="post_attention_gain",
            readers=(Linear("gate_proj", NEURONS, mlp_bias), Linear("up_proj", NEURONS, mlp_bias)),
            writer=Linear("down_proj", NEURONS, mlp_bias),
        ),
    )


LLAMA = Family(
    model_type="llama",
    name="Llama",
    modeling="rewired.model.modeling_rewired_llama",
    unread="pretraining_tp",
    modules=usual_modules("attention_bias", "attention_bias", "mlp_bias"),
)
MISTRAL = Family(  # the dense ones: 7B, Nemo, Small
    model_type="mistral",
    name="Mistral",
    modeling="rewired.model.modeling_rewired_mistral",
    modules=usual_modules(),
    has_windows=True,
)
QWEN2 = Family(  # dense; also Qwen2.5, and what was distilled into either
    model_type="qwen2",
    name="Qwen2",
    modeling="rewired.model.modeling_rewired_qwen2",
    modules=usual_modules(reader_bias=True),
    has_windows=True,
)
QWEN3 = Family(  # dense
    model_type="qwen3",
    name="Qwen3",
    modeling="rewired.model.modeling_rewired_qwen3",
    modules=usual_modules(
        "attention_bias",
        "attention_bias",
        inside_attention=(Replicated("q_norm", HEAD_DIM), Replicated("k_norm", HEAD_DIM)),
    ),
    head_dim=128,
    has_windows=True,
)
