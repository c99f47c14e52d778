"""Ranges of layers, as users write them, and the modules that they cover."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Module = Literal["both", "attn", "mlp"]


@dataclass(frozen=True)
class LayerRange:
    """Layers `start` to `stop - 1`, or only their attention or only their MLP."""

    start: int
    stop: int
    module: Module = "both"

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}" + ("" if self.module == "both" else f":{self.module}")

    @property
    def module_indices(self) -> range:
        """Indices into the model's modules: 2 * layer for attention, 2 * layer + 1 for the MLP."""
        offset = 1 if self.module == "mlp" else 0
        return range(2 * self.start + offset, 2 * self.stop, 1 if self.module == "both" else 2)


def parse_layers(spec: str, num_layers: int) -> tuple[LayerRange, ...]:
    """Ranges as users write them: `16-32`, `16-`, `-8` (the last eight), `5`, `0-4,8-12`, `16-32:attn`.

    Ranges are half-open, as in the Ladder paper. Raises ValueError for a range that is empty, reversed or beyond the
    model, and for what is no range at all.
    """
    return tuple(_parse_range(item.strip(), spec, num_layers) for item in spec.split(","))


def _parse_range(item: str, spec: str, num_layers: int) -> LayerRange:
    modules: dict[str | None, Module] = {None: "both", "attn": "attn", "mlp": "mlp"}
    match = re.fullmatch(r"(\d*)(-?)(\d*)(?::(attn|mlp))?", item)
    first, dash, last, module = match.groups() if match else ("", "", "", None)
    if not (first or last):
        raise ValueError(
            f"'{spec}' is not a range of layers: write 16-32, 16- (to the end), -8 (the last eight), "
            "0-4,8-12, or 16-32:attn and 16-32:mlp for one module."
        )
    if not first:
        start, stop = num_layers - int(last), num_layers
    elif not dash:
        start, stop = int(first), int(first) + 1
    else:
        start, stop = int(first), int(last) if last else num_layers
    if start < 0 or stop > num_layers:
        raise ValueError(f"Layers '{item}' lie beyond the model, which has {_layers(num_layers)}.")
    if start >= stop:
        raise ValueError(
            f"Layers '{item}' name no layer: a range is half-open, so its end must be larger than its start "
            f"(the model has {_layers(num_layers)})."
        )
    return LayerRange(start, stop, modules[module])


def _layers(num_layers: int) -> str:
    return f"layers 0 to {num_layers - 1}" if num_layers > 1 else "layer 0 alone"


def as_ranges(indices: Iterable[int]) -> list[LayerRange]:
    """The fewest ranges that cover these module indices."""
    covered = set(indices)
    ranges: list[LayerRange] = []
    for layer in sorted({index // 2 for index in covered}):
        module: Module = "both" if {2 * layer, 2 * layer + 1} <= covered else "attn" if 2 * layer in covered else "mlp"
        if ranges and ranges[-1].stop == layer and ranges[-1].module == module:
            ranges[-1] = replace(ranges[-1], stop=layer + 1)
        else:
            ranges.append(LayerRange(layer, layer + 1, module))
    return ranges


def ranges_of_layers(layers: Iterable[int]) -> list[LayerRange]:
    """The fewest ranges that cover these layers, both modules of each."""
    return as_ranges(index for layer in layers for index in LayerRange(layer, layer + 1).module_indices)
