"""The config of a rewired Llama: LlamaConfig, plus the wiring of every layer and the number of logical shards."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from .wiring import ModuleWiring, Region, check_shards, parse_wiring, resolve, wiring_to_json


@strict
class RewiredLlamaConfig(LlamaConfig):
    r"""
    Args:
        wiring (`list[dict]`, *optional*):
            Regions of layers and their wiring, e.g. `[{"layers": "16-32", "preset": "ladder", "peek": true}]`; see
            `wiring.py`. Layers that no entry names are `standard`, and are written out as such.
        tp_shards (`int`, *optional*, defaults to 1):
            The number of logical tensor-parallel shards r. It is part of the model's function for `desync`,
            `partial` and `peek`, wherever the model runs.

    Raises ValueError when the wiring or tp_shards do not fit the model.
    """

    model_type = "rewired_llama"
    base_model_tp_plan = LlamaConfig.base_model_tp_plan | {"layers.*": "rewired_layer"}  # `tensor_parallel.py`

    wiring: list[dict[str, Any]] | None = None
    tp_shards: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_shards(
            self.tp_shards,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads or self.num_attention_heads,
            intermediate_size=self.intermediate_size,
        )
        self.wiring = wiring_to_json(self.regions)
        self.module_wirings()  # raises where two regions do not go together

    @property
    def regions(self) -> list[Region]:
        return parse_wiring(self.wiring, self.num_hidden_layers)

    @property
    def depends_on_shards(self) -> bool:
        """Whether the model computes something else with another number of logical shards."""
        return any(module.depends_on_shards for layer in self.module_wirings() for module in layer)

    def module_wirings(self) -> list[tuple[ModuleWiring, ModuleWiring]]:
        """The attention's and the MLP's wiring of every layer."""
        modules = resolve(self.regions, self.num_hidden_layers, self.hidden_size)
        return list(zip(modules[::2], modules[1::2], strict=True))


RewiredLlamaConfig.register_for_auto_class()

__all__ = ["RewiredLlamaConfig"]
