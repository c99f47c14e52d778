"""The student: the model that is trained, loaded whole or sharded over ranks, and frozen where it is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

import rewired  # noqa: F401 - registers the rewired classes
from rewired.grid.parallel import tp_plan

from ..recipe.keys import LORA, Recipe
from . import lora
from .four_bit import keep_packing
from .tied_head import tie
from .trainable import choose_or_adapt


def load_student(recipe: Recipe, folder: Path, model_init_kwargs: Mapping[str, Any] | None = None) -> Any:
    """The model in `folder`, a PeftModel where LoRA is trained and nothing is sharded.

    Raises ValueError for `model_init_kwargs` that from_pretrained does not take.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, **(model_init_kwargs or {})}
    if recipe.is_sharded:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        options["distributed_config"] = distributed_config(recipe, config)
    if recipe.load_in_4bit and not recipe.is_sharded:
        options["quantization_config"] = in_4bit(options["dtype"])
    has_adapters = recipe.is_sharded and recipe.train == LORA
    try:
        model: Any = (
            lora.load_sharded(folder, recipe, **options)
            if has_adapters
            else AutoModelForCausalLM.from_pretrained(folder, **options)
        )
    except (ImportError, TypeError) as error:  # a package that is missing, a key that no model has
        raise ValueError(f"model_init_kwargs: {str(error).strip().splitlines()[0]}") from None
    keep_packing(model)
    if recipe.cache_gathers:
        for layer in model.base.decoder_layers[-recipe.cache_gathers :]:
            layer.set_reshard_after_forward(False)
    # transformers lets gradients reach the embedding's output for checkpoints that are reentrant, which these are not:
    # backward would run through all the frozen layers below
    model.enable_input_require_grads = lambda: None
    if model.config.tie_word_embeddings:
        if recipe.is_sharded:
            tie(model, in_fsdp=recipe.tp_size == 1 or recipe.fsdp_size > 1)
        else:  # the Trainer would miss the head in its checkpoints
            model._keys_to_ignore_on_save = [f"{model.family.head}.weight"]
    if not has_adapters:
        model = choose_or_adapt(model, recipe)
        lora.draw(model)
    return model


def in_4bit(dtype: torch.dtype | str) -> BitsAndBytesConfig:
    """How frozen projections are held that nothing shards, and computed with in `dtype`."""
    computed_in = torch.bfloat16 if dtype == "auto" else dtype
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed_in,
    )


def distributed_config(recipe: Recipe, config: Any) -> DistributedConfig:
    """The mesh over which transformers shards the student, of this RewiredConfig, and its teacher as it loads them."""
    sizes: dict[str, Any] = {name: int(getattr(recipe, name)) for name in ("tp_size", "fsdp_size", "dp_replicate_size")}
    return DistributedConfig(**sizes, tp_plan=tp_plan(config, recipe.grid, recipe.fsdp_size))


def unwrapped(model: Any) -> Any:
    """The model that PEFT wraps, if it does."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
