"""The traffic of a wiring: all-reduces a token and bytes sent, in total and region by region."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rewired.model.wiring import ModuleWiring, Wiring
from rewired.model.wiring_text import region_name

_WAITING = (
    "The model waits for an all-reduce only where the next module needs its result; else it computes on meanwhile."
)
_PAYLOADS = (
    "Payloads save these bytes on {0} ranks. A rank that holds several of the {0} shards sends the part of each: the "
    "model computes the same, and fewer bytes are saved, or none."
)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Traffic:
    """All-reduces per token. `exposed` ones are waited for at once; the others hide behind compute.

    `bytes_sent` is what each of r ranks sends in a ring all-reduce: 2 * (r - 1) / r of the payload; as many
    where a payload is packed.
    """

    all_reduces: int
    exposed: int
    bytes_sent: int

    @classmethod
    def of(cls, modules: Iterable[ModuleWiring], tp_shards: int, item_bytes: int) -> Traffic:
        launching = [module for module in modules if module.launches]
        payload = sum(module.payload_bytes(item_bytes) for module in launching)
        return cls(
            all_reduces=len(launching),
            exposed=sum(module.is_exposed for module in launching),
            bytes_sent=2 * (tp_shards - 1) * payload // tp_shards,
        )


@dataclass(frozen=True)
class LayerTable:
    """A checkpoint's wiring, region by region, and its traffic beside that of the dense model."""

    rows: list[tuple[str, str, Traffic]]  # layers, wiring, traffic
    total: Traffic
    dense: Traffic
    tp_shards: int
    has_payloads: bool

    @classmethod
    def of(cls, wiring: Wiring, tp_shards: int, dtype: str) -> LayerTable:
        def traffic(modules: Iterable[ModuleWiring]) -> Traffic:
            return Traffic.of(modules, tp_shards, _ITEM_BYTES.get(dtype, 2))

        rows = [
            (region.layers, region_name(region), traffic(wiring.modules[index] for index in region.module_indices))
            for region in wiring.regions
        ]
        dense = Wiring.dense(wiring.num_layers, wiring.hidden_size)
        has_payloads = any(module.sections for module in wiring.modules)
        return cls(rows, traffic(wiring.modules), traffic(dense.modules), tp_shards, has_payloads)

    @property
    def remarks(self) -> str:
        """What to say below the table."""
        return f"{_WAITING} {_PAYLOADS.format(self.tp_shards)}" if self.has_payloads else _WAITING

    def to_json(self) -> dict[str, Any]:
        return {
            "tp_shards": self.tp_shards,
            "layers": [{"layers": layers, "wiring": wiring, **vars(traffic)} for layers, wiring, traffic in self.rows],
            "per_token": vars(self.total),
            "per_token_dense": vars(self.dense),
        }
