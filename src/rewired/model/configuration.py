"""What the config of every rewired model has: the wiring of its layers, and the number of logical shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .family import Family
from .version import FIRST, VERSION, check_version
from .wiring import Wiring

# a stock plan sums these gradients itself; `tensor_parallel.py` sums those of all that ranks hold whole
_SUMS_GRADIENTS = "replicated_with_grad_allreduce"


@strict
class RewiredConfig(PreTrainedConfig):
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

    _auto_class = "AutoConfig"  # its code, and that of the models, travels in every checkpoint
    family: ClassVar[Family]

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
        self.family.check_shards(self, self.tp_shards)
        self.wiring = self.resolved_wiring.to_json()

    def to_dict(self) -> dict[str, Any]:
        """What `config.json` holds: also what keeps a stock class from running it without its wiring."""
        return super().to_dict() | self.family.refusal

    @property
    def resolved_wiring(self) -> Wiring:
        """The wiring of every module, as `wiring` says it."""
        return _parsed(json.dumps(self.wiring), self.num_hidden_layers, self.hidden_size)

    @property
    def depends_on_shards(self) -> bool:
        """Whether the model computes something else with another number of logical shards."""
        return self.resolved_wiring.depends_on_shards


def rewired_plan(family: Family, stock: Mapping[str, str]) -> dict[str, str]:
    """The tensor-parallel plan of a family's rewired models, from that of the `stock` ones."""
    kept = {pattern: style for pattern, style in stock.items() if style != _SUMS_GRADIENTS}
    return kept | {f"{family.layers}.*": "rewired_layer"}


@cache
def _parsed(wiring: str, num_layers: int, hidden_size: int) -> Wiring:
    return Wiring.from_json(json.loads(wiring), num_layers, hidden_size)
