"""The families of models that rewired knows: a new one is one entry here, its data and its classes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .model.family import LLAMA, MISTRAL, QWEN2, QWEN3, Family

# by the model_type of stock checkpoints
FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def family_of(model_type: Any) -> Family | None:
    """The family whose checkpoints, stock or rewired, say this model_type."""
    known = {name: family for family in FAMILIES.values() for name in (family.model_type, family.rewired_type)}
    return known.get(model_type) if isinstance(model_type, str) else None


def names() -> str:
    """Those of all families, in a sentence."""
    *first, last = (family.name for family in FAMILIES.values())
    return f"{', '.join(first)} or {last}"


def why_not(model_type: Any) -> str:
    """Why models of this type are of no family, as a clause, where it is known; else nothing."""
    for reason, kinds in _NOT_YET.items():
        if isinstance(model_type, str) and any(kind in model_type for kind in kinds):
            return f" ({reason})"
    return ""


# by what a model_type has in it
_NOT_YET = {
    "a mixture of experts; take a dense model": ("moe", "mixtral", "deepseek", "gpt_oss", "llama4"),
    "it sees; take a model of text alone": ("_vl", "mllama", "llava", "mistral3", "pixtral", "paligemma", "vision"),
    "its attention is partly linear or recurrent; take one with softmax attention in all layers": (
        "qwen3_next",
        "qwen3_5",
        "mamba",
        "jamba",
        "rwkv",
        "falcon_h1",
        "granitemoehybrid",
    ),
    "it normalises what its modules write, which wirings here do not do": (
        "gemma2",
        "gemma3",
        "gemma4",
        "olmo2",
        "olmo3",
        "glm4",
        "exaone4",
    ),
}


def classes(family: Family, kind: str) -> Any:
    """A family's rewired class of a `kind`: Config, DecoderLayer, Model, ForCausalLM. Imports transformers."""
    return getattr(import_module(family.modeling), f"Rewired{family.name}{kind}")


def stock(family: Family, kind: str) -> Any:
    """transformers' own class of that kind, which a rewired one names last among its bases."""
    return classes(family, kind).__bases__[-1]


def register_classes(family: Family) -> None:
    """Make transformers' Auto classes know a family's rewired models."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = classes(family, "Config")
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, classes(family, "Model"), exist_ok=True)
    AutoModelForCausalLM.register(config, classes(family, "ForCausalLM"), exist_ok=True)
    _choose_tokenizers_alike(family)


def _choose_tokenizers_alike(family: Family) -> None:
    """Make AutoTokenizer take a rewired model for a stock one: for some types it overrules the class that is named."""
    from transformers.models.auto import tokenization_auto as auto

    if family.model_type in auto.TOKENIZER_MAPPING_NAMES:
        auto.TOKENIZER_MAPPING_NAMES[family.rewired_type] = auto.TOKENIZER_MAPPING_NAMES[family.model_type]
    if family.model_type in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
        auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.add(family.rewired_type)
