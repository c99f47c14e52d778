"""LoRA: how adapters begin, alike on any number of ranks, and how they are merged. Norms and gains learn beside them.

A model that is sharded when it is loaded has its adapters before, so that FSDP2 shards them with the rest. PEFT alone
would add them afterwards, whole on every rank, and nothing would add up their gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.tensors import read_tensor
from rewired.families import classes

from ..recipe.keys import Recipe
from .four_bit import In4Bit
from .trainable import keep_the_streams_dtype, learn_in_float32, lora_config, norms_and_gains

_ADAPTER = "default"  # as PEFT calls it


def load_sharded(folder: Path, recipe: Recipe, **options: Any) -> Any:
    """The model in `folder`, or in a checkpoint that this training has saved, with adapters."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    family, lora = config.family, lora_config(config, recipe)
    plain = classes(family, "ForCausalLM")
    kept = {"lora_A", "lora_B", *family.norms, *family.gains, *(plain._keep_in_fp32_modules_strict or ())}
    # of the model's own module: transformers saves its files with a checkpoint
    attributes = {"lora": lora, "_keep_in_fp32_modules_strict": kept, "__module__": plain.__module__}
    bases = (In4Bit, _WithAdapters, plain) if recipe.load_in_4bit else (_WithAdapters, plain)
    adapted: Any = type(plain.__name__, bases, attributes)
    layers, modules = cast(list[int] | None, lora.layers_to_transform), cast(set[str], lora.target_modules)
    numbers = r"\d+" if layers is None else "|".join(map(str, layers))
    targets = "|".join(sorted(modules))
    path = rf"({family.layers}\.(?:{numbers})\..*\b(?:{targets}))"
    names = {rf"{path}\.{name}": rf"\1.base_layer.{name}" for name in ("weight", "bias")}
    model, info = adapted.from_pretrained(folder, key_mapping=names, output_loading_info=True, **options)
    for name, parameter in model.named_parameters():  # loading makes new ones, and lets some of the frozen learn
        parameter.requires_grad_(name in model.trained)
    if info["missing_keys"]:
        assert all(".lora_" in name for name in info["missing_keys"]), info
        draw(model)
    return model


class _WithAdapters:
    """Before a model's class among the bases of one whose projections have adapters."""

    lora: ClassVar[LoraConfig]

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        model: Any = self
        inject_adapter_in_model(self.lora, model)
        for name in norms_and_gains(model):
            model.get_submodule(name).requires_grad_(True)
        small = (*model.family.norms, *model.family.gains)  # loading holds those that do not learn in float32, too
        keep_the_streams_dtype(module for path, module in model.named_modules() if path.endswith(small))
        learn_in_float32(model)
        self.trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def _resolve_parallel_plans(self, *args: Any, **kwargs: Any) -> tuple[dict[str, str], ...]:
        """transformers' own, which name projections; of an adapted one, its parts are split as PEFT splits them."""
        of_layers, of_experts, of_fsdp = super()._resolve_parallel_plans(*args, **kwargs)  # type: ignore[misc]
        modules: dict[str, Any] = dict(self.named_modules())  # type: ignore[attr-defined]
        for path in [path for path, module in modules.items() if isinstance(module, LoraLayer) and path in of_layers]:
            style = of_layers.pop(path)
            split = "lora_B" if style == "colwise" else "lora_A"
            names = [name for name, _ in modules[path].named_parameters() if name.startswith(("base_layer", split))]
            of_layers |= {f"{path}.{name}": style for name in names}
        # a layer is gathered as one: what is in float32 apart from the rest would be when it is called, and adapters on
        # views that differ per shard are not
        inside = re.compile(rf"{self.family.layers}\.\d+\.")  # type: ignore[attr-defined]
        return of_layers, of_experts, {path: style for path, style in of_fsdp.items() if not inside.search(path)}


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Begin with adapters that change nothing, drawn by the seed that was set last: alike on all ranks, or on one."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            a, b = (cast(nn.Linear, each[_ADAPTER]).weight for each in (layer.lora_A, layer.lora_B))
            whole = nn.init.kaiming_uniform_(torch.empty(a.shape), a=sqrt(5), generator=generator)
            if isinstance(a, DTensor):
                whole = distribute_tensor(whole.to(a.device), a.device_mesh, a.placements, src_data_rank=None)
            a.copy_(whole)
            b.zero_()


def merged(model: Any, start: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model that began as the checkpoint in `start`, whole, its adapters added to the weights.

    What is frozen comes from the files: in memory it may have fewer bits. Gains are in none that `convert` wrote. All
    ranks have to take all tensors.
    """
    files = Checkpoint.open(start).tensors()
    for name, info in files.items():
        path, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(path)
        value = read_tensor(start / info.file, name)
        if isinstance(module, LoraLayer):
            if attribute == "weight":
                value = value.float() + _added(module).cpu()
        elif (trained := _trained(module).get_parameter(attribute)).requires_grad:
            value = whole(trained.detach())
        yield name, value
    for name in (f"{path}.weight" for path in norms_and_gains(model)):
        if name not in files:
            yield name, whole(_trained(model.get_submodule(name.removesuffix(".weight"))).weight.detach())


def _trained(module: Any) -> Any:
    return module.modules_to_save[_ADAPTER] if isinstance(module, ModulesToSaveWrapper) else module


def _added(layer: Any) -> torch.Tensor:
    b, a = (whole(each[_ADAPTER].weight.detach()) for each in (layer.lora_B, layer.lora_A))
    added: torch.Tensor = layer.scaling[_ADAPTER] * (b @ a)
    return added


def whole(tensor: Any) -> torch.Tensor:
    """It, gathered from all ranks where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
