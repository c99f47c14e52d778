"""The parameters and layers that a training changes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from peft import LoraConfig, get_peft_model
from peft.utils import ModulesToSaveWrapper
from torch import nn

from rewired.checkpoint.provenance import Changed
from rewired.model.rewired_model import RewiredForCausalLM

from ..recipe.keys import LORA, Recipe

_SMALL = ("norm", "gain")  # the ends of the names of norms and gains


UNCHANGED = Changed()


def rewired_layers(config: Any) -> list[int]:
    """The layers of a RewiredConfig of which a module is rewired."""
    return config.resolved_wiring.rewired_layers


def first_changed(model: RewiredForCausalLM, changed: Changed = UNCHANGED) -> int:
    """The first layer that is rewired, trained or `changed`: the layers below it compute what the original's do.

    -1 if the embedding is trained or changed, the number of layers if nothing differs.
    """
    if changed.ends or is_trained(model.get_input_embeddings()):
        return -1
    trained = [index for index, layer in enumerate(model.base.decoder_layers) if is_trained(layer)]
    return min([*rewired_layers(model.config), *trained, *changed.layers], default=model.config.num_hidden_layers)


def changed_after(model: Any, before: Changed) -> Changed:
    """What differs from the original's weights once `model` is trained, by what did `before`."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    matches = [re.search(rf"\b{model.config.family.layers}\.(\d+)\.", name) for name in trained]
    layers = {int(match[1]) for match in matches if match}
    return Changed(tuple(sorted(layers.union(before.layers))), before.ends or None in matches)


def choose_or_adapt(model: RewiredForCausalLM, recipe: Recipe) -> Any:
    """`model` with gradients for what `recipe` trains alone: a PeftModel around it, where that is LoRA in the rewired
    layers, or in all if none is rewired. Raises ValueError if nothing is trained."""
    if recipe.train != LORA:
        choose(model, recipe.train)
        return model
    config = lora_config(model.config, recipe)
    config.modules_to_save = norms_and_gains(model)
    adapted = get_peft_model(model, config)
    learn_in_float32(adapted)
    keep_the_streams_dtype(module for module in adapted.modules() if isinstance(module, ModulesToSaveWrapper))
    return adapted


def norms_and_gains(model: RewiredForCausalLM) -> list[str]:
    """The modules that are trained whole beside adapters, by their paths: of the rewired layers, or of all."""
    layers = rewired_layers(model.config) or range(model.config.num_hidden_layers)
    within = tuple(f"{model.family.layer(index)}." for index in layers)
    return [name for name, _ in model.named_modules() if name.startswith(within) and name.endswith(_SMALL)]


def learn_in_float32(adapted: nn.Module) -> None:
    """Hold what is trained in float32, where no step is lost."""
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def keep_the_streams_dtype(modules: Iterable[nn.Module]) -> None:
    """Let norms and gains that are held in float32 give what they are given."""
    for module in modules:
        module.register_forward_hook(lambda _, given, output: output.to(given[0].dtype))


def lora_config(config: Any, recipe: Recipe) -> LoraConfig:
    """The LoRA of `recipe` in the rewired layers of a model of this `config`, or in all if none is rewired."""
    layers = rewired_layers(config) or None
    return LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        target_modules=recipe.lora_target_modules or list(config.family.linears),
        layers_to_transform=layers,
        layers_pattern=config.family.layers if layers else None,
        task_type="CAUSAL_LM",
    )


def choose(model: RewiredForCausalLM, train: str) -> None:
    """Let gradients reach only the parameters that `train` names. Raises ValueError if there are none."""
    rewired = tuple(f"{model.family.layer(index)}." for index in rewired_layers(model.config))
    for name, parameter in model.named_parameters():
        is_small = name.removesuffix(".weight").endswith(_SMALL)
        parameter.requires_grad_(
            train == "all" or (name.startswith(rewired) and (is_small or train != "norms_and_gains"))
        )
    if not is_trained(model):
        raise ValueError(
            f"No layer of this model is rewired, so that `train: {train}` trains nothing: give a wiring, or train: all."
        )


def is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
