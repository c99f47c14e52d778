"""The families of models that rewired knows: a new one is one entry here, its data and its classes."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from .model.family import Family
from .model.llama_family import LLAMA

FAMILIES: dict[str, Family] = {LLAMA.model_type: LLAMA}  # by the model_type of stock checkpoints


def register(family: Family) -> None:
    """Make another family known, for this process."""
    FAMILIES[family.model_type] = family
    if "transformers" in sys.modules:
        register_classes(family)


def family_of(model_type: Any) -> Family | None:
    """The family whose checkpoints, stock or rewired, say this model_type."""
    known = {name: family for family in FAMILIES.values() for name in (family.model_type, family.rewired_type)}
    return known.get(model_type) if isinstance(model_type, str) else None


def names() -> str:
    """Those of all families, in a sentence."""
    return ", ".join(family.name for family in FAMILIES.values())


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
