"""The traffic of a wiring: all-reduces a token and bytes sent, in total and region by region."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rewired.checkpoint.shape import Shape
from rewired.model.payload import GROUP, Sections, packed_bytes
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

    `bytes_sent` is what each of r ranks sends in a ring all-reduce: 2 * (r - 1) / r of the payload. Of what is packed,
    (r - 1) / r goes out for each shard that a rank holds, and as much of the sum comes back.
    """

    all_reduces: int
    exposed: int
    bytes_sent: int

    @classmethod
    def of(cls, modules: Iterable[ModuleWiring], ranks: int, item_bytes: int, held: int = 1) -> Traffic:
        launching = [
            replace(each, sections=_in_whole_shares(each.sections, ranks)) for each in modules if each.launches
        ]
        payload = sum(2 * module.payload_bytes(item_bytes) for module in launching)
        parts = [tuple(section._replace(sum_bits=section.bits) for section in module.sections) for module in launching]
        payload += (held - 1) * sum(map(packed_bytes, parts))
        return cls(
            all_reduces=len(launching),
            exposed=sum(module.is_exposed for module in launching),
            bytes_sent=(ranks - 1) * payload // ranks,
        )


def _in_whole_shares(sections: Sections, ranks: int) -> Sections:
    """Sections padded as they are sent: each rank adds up some groups, and all send as many as the one with most."""
    share = ranks * GROUP
    return tuple(section._replace(channels=-(-section.channels // share) * share) for section in sections)


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
        return f"{_WAITING} {_PAYLOADS.format(self.tp_shards)}" if self.has_payloads else _WAITING

    def to_json(self) -> dict[str, Any]:
        return {
            "tp_shards": self.tp_shards,
            "layers": [{"layers": layers, "wiring": wiring, **vars(traffic)} for layers, wiring, traffic in self.rows],
            "per_token": vars(self.total),
            "per_token_dense": vars(self.dense),
        }


def notes_on_ranks(wiring: Wiring, shape: Shape, tp_shards: int, dtype: str) -> list[str]:
    """What each of 2, 4 and 8 ranks sends, where so many can share out the model, or would with as many shards."""
    notes, dense = [], Wiring.dense(wiring.num_layers, wiring.hidden_size)
    for ranks in (ranks for ranks in (2, 4, 8) if shape.most_shards % ranks == 0):
        before, *sent = (
            Traffic.of(each.modules, ranks, _ITEM_BYTES.get(dtype, 2), held).bytes_sent
            for each, held in ((dense, 1), (wiring, tp_shards // ranks), (wiring, 1))
        )
        now, anew = (f"{each / 1024:.1f} KiB ({each / before:.0%} of dense)" for each in sent)
        runs = not wiring.depends_on_shards or tp_shards % ranks == 0
        ways = [now] * runs + [f"{anew} with --tp-shards {ranks}"] * (not runs or now != anew)
        notes.append(f"A token costs each of {ranks} ranks {', or '.join(ways)}.")
    return notes
