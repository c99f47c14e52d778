"""LoRA on a student, by PEFT: in the rewired layers, or in all if none is rewired."""

from __future__ import annotations

from peft import LoraConfig, PeftModel, get_peft_model

from rewired.model.rewired_model import RewiredForCausalLM

from ..recipe.keys import Recipe
from .trainable import rewired_layers


def add_lora(model: RewiredForCausalLM, recipe: Recipe) -> PeftModel:
    """`model` with adapters in its projections, which are changed in place, and all other weights frozen."""
    family, layers = model.family, rewired_layers(model.config) or None
    config = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        target_modules=recipe.lora_target_modules or list(family.linears),
        layers_to_transform=layers,
        layers_pattern=family.layers if layers else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
