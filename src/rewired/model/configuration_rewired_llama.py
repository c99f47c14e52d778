"""The config of a rewired Llama: LlamaConfig plus the wiring of every layer and the number of logical shards."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from .version import FIRST, VERSION, check_version
from .wiring import Wiring, check_shards


@strict
class RewiredLlamaConfig(LlamaConfig):
    r"""
    Args:
        wiring (`list[dict]`, *optional*):
            Regions of layers and their wiring, e.g. `[{"layers": "16-32", "preset": "ladder", "peek": true}]`; see
            `presets.py`. Layers that no entry names become `standard` entries.
        tp_shards (`int`, *optional*, defaults to 1):
            The number of logical tensor-parallel shards r. It is part of the model's function for `desync`,
            `partial`, `peek` and payloads, wherever the model runs.
        wiring_version (`int`, *optional*):
            The version of the format, see `version.py`.

    Raises ValueError when the wiring or tp_shards do not fit the model, and for a version that it does not know.
    """

    model_type = "rewired_llama"
    base_model_tp_plan = LlamaConfig.base_model_tp_plan | {"layers.*": "rewired_layer"}  # `tensor_parallel.py`

    wiring: list[dict[str, Any]] | None = None
    tp_shards: int = 1
    wiring_version: Any = VERSION

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config that a checkpoint's `config.json` holds, whatever its version; it is of ours from then on."""
        return super().from_dict({"wiring_version": FIRST, **config_dict}, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_version(vars(self))
        self.wiring_version = VERSION
        check_shards(
            self.tp_shards,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads or self.num_attention_heads,
            intermediate_size=self.intermediate_size,
        )
        self.wiring = self.resolved_wiring.to_json()

    @property
    def resolved_wiring(self) -> Wiring:
        """The wiring of every module, as `wiring` says it."""
        return Wiring.from_json(self.wiring, self.num_hidden_layers, self.hidden_size)

    @property
    def depends_on_shards(self) -> bool:
        """Whether the model computes something else with another number of logical shards."""
        return self.resolved_wiring.depends_on_shards


RewiredLlamaConfig.register_for_auto_class()

__all__ = ["RewiredLlamaConfig"]
