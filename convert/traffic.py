"""What a conversion will do: the new wiring of a checkpoint, and what it changes in its communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewired.checkpoint.llama import LlamaShape
from rewired.model.layer_ranges import as_ranges
from rewired.model.wiring import ModuleWiring, Region, complete, parse_region, resolve

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def rewire(current: Sequence[Region], entries: Iterable[Mapping[str, Any]], num_layers: int) -> list[Region]:
    """The wiring after `entries` (JSON form) took the layers that they name; the others keep theirs.

    Raises ValueError when an entry is malformed or two of them name the same module.
    """
    new = [parse_region(entry, num_layers) for entry in entries]
    complete(new, num_layers)  # refuses entries that overlap
    taken = {index for region in new for index in region.module_indices}
    kept = [_without(region, taken) for region in current if not region.is_dense]
    return complete([region for region in kept if region.ranges] + new, num_layers)


def _without(region: Region, taken: set[int]) -> Region:
    """`region` less the modules in `taken`. Untouched ranges stay as they are, since each range is a unit."""
    ranges = []
    for layer_range in region.ranges:
        left = set(layer_range.module_indices) - taken
        ranges += [layer_range] if len(left) == len(layer_range.module_indices) else as_ranges(left)
    return replace(region, ranges=tuple(ranges))


@dataclass(frozen=True)
class Traffic:
    """What one token costs in all-reduces. `exposed` ones are waited for at once; the others hide behind compute.

    `bytes_sent` is what each of r ranks sends in a ring all-reduce: 2 * (r - 1) / r of the payload.
    """

    all_reduces: int
    exposed: int
    bytes_sent: int

    @classmethod
    def of(cls, modules: Iterable[ModuleWiring], tp_shards: int, item_bytes: int) -> Traffic:
        launching = [module for module in modules if module.launches]
        payload = sum(module.shared_channels for module in launching) * item_bytes
        return cls(
            all_reduces=len(launching),
            exposed=sum(not module.overlapped for module in launching),
            bytes_sent=2 * (tp_shards - 1) * payload // tp_shards,
        )


@dataclass(frozen=True)
class LayerTable:
    """A checkpoint's wiring, region by region, and its traffic beside that of the dense model."""

    rows: list[tuple[str, str, Traffic]]  # layers, wiring, traffic
    total: Traffic
    dense: Traffic
    tp_shards: int

    @classmethod
    def of(cls, regions: Sequence[Region], shape: LlamaShape, tp_shards: int, dtype: str) -> LayerTable:
        item_bytes = _ITEM_BYTES.get(dtype, 2)
        modules = resolve(regions, shape.num_hidden_layers, shape.hidden_size)
        plain = resolve(complete([], shape.num_hidden_layers), shape.num_hidden_layers, shape.hidden_size)
        rows = []
        for region in regions:
            own = [modules[index] for index in region.module_indices]
            rows.append((region.layers, region.describe(), Traffic.of(own, tp_shards, item_bytes)))
        return cls(
            rows, Traffic.of(modules, tp_shards, item_bytes), Traffic.of(plain, tp_shards, item_bytes), tp_shards
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "tp_shards": self.tp_shards,
            "layers": [{"layers": layers, "wiring": wiring, **vars(traffic)} for layers, wiring, traffic in self.rows],
            "per_token": vars(self.total),
            "per_token_dense": vars(self.dense),
        }
