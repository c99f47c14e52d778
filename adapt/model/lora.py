"""LoRA on a student, by PEFT: in the rewired layers, or in all if none is rewired."""

from __future__ import annotations

from peft import LoraConfig, PeftModel, get_peft_model

from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.model.sharding import COLUMN_PARALLEL, ROW_PARALLEL

from ..recipe.keys import Recipe
from .trainable import rewired_layers


def add_lora(model: RewiredLlamaForCausalLM, recipe: Recipe) -> PeftModel:
    """`model` with adapters in its projections, which are changed in place, and all other weights frozen."""
    config = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        target_modules=recipe.lora_target_modules or [*COLUMN_PARALLEL, *ROW_PARALLEL],
        layers_to_transform=rewired_layers(model.config) or None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
