"""Regions of layers that share a preset: as `config.json` holds them, checked, and written back; and their ranges,
as users write them. Without torch.

[{"layers": "0-16", "preset": "standard"},
 {"layers": "16-32", "preset": "ladder", "peek": true}]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .payload import FULL
from .presets import PRESETS, STANDARD, Options


@dataclass(frozen=True)
class Region:
    """Ranges of layers with one preset. In each range, modules are counted anew, and the last one reduces all."""

    ranges: tuple[LayerRange, ...]
    preset: str
    options: Options = field(hash=False)  # all of the preset's, and the modifiers

    @property
    def peek(self) -> bool:
        return bool(self.options["peek"])

    @property
    def delay(self) -> int:
        """How many updates late its modules read the stream; 0 where they wait."""
        return int(self.options["delay"]) if self.options["overlap"] else 0

    @property
    def merge(self) -> str:
        """How local parts are folded into a reduction: by `sum` or `mean`."""
        return str(self.options.get("merge", "sum"))

    @property
    def payload(self) -> str:
        """What a reduction sends: `payload.py`."""
        return str(self.options["payload"])

    @property
    def is_dense(self) -> bool:
        return self.preset == STANDARD and not (self.peek or self.delay) and self.payload == FULL

    @property
    def layers(self) -> str:
        return ",".join(str(layer_range) for layer_range in self.ranges)

    @property
    def layer_indices(self) -> set[int]:
        """The layers of which it has a module, or both."""
        return {index // 2 for index in self.module_indices}

    @property
    def module_indices(self) -> list[int]:
        return [index for layer_range in self.ranges for index in layer_range.module_indices]

    def without(self, modules: set[int]) -> Region:
        """The region less `modules`. Untouched ranges stay as they are, since each range is a unit.

        Raises ValueError where what is left of it is none.
        """
        ranges: list[LayerRange] = []
        for layer_range in self.ranges:
            left = set(layer_range.module_indices) - modules
            ranges += [layer_range] if len(left) == len(layer_range.module_indices) else as_ranges(left)
        rest = replace(self, ranges=tuple(ranges))
        _check_options(rest.layers, rest.preset, rest.options)
        return rest

    def to_json(self) -> dict[str, Any]:
        """`layers`, `preset`, the preset's own options, and those modifiers that differ from its defaults."""
        preset = PRESETS[self.preset]
        own, defaults = {option.name for option in preset.options}, preset.defaults()
        written = {name: value for name, value in self.options.items() if name in own or value != defaults[name]}
        return {"layers": self.layers, "preset": self.preset, **written}


def make_region(layers: str, preset: str, num_layers: int, /, **options: Any) -> Region:
    """A checked region. An option that is None takes the preset's default. Raises ValueError."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"'{preset}' is not a wiring: choose one of {', '.join(PRESETS)}.")
    known = PRESETS[preset].all_options
    readers = {option.name: option.read for option in known}
    given = {
        name: readers[name](value) if name in readers else value for name, value in options.items() if value is not None
    }
    _check_options(layers, preset, given)
    if "delay" in given and not given.get("overlap", True):
        raise ValueError(f"Layers {layers} cannot both wait and read late: leave out overlap or delay.")
    values = PRESETS[preset].defaults() | ({"overlap": True} if "delay" in given else {}) | given
    return Region(parse_layers(layers, num_layers), preset, {option.name: values[option.name] for option in known})


def _check_options(layers: str, preset: str, given: Options) -> None:
    known = PRESETS[preset].all_options
    names = sorted(option.name for option in known)
    for name in given:
        if name not in names:
            listed = ", ".join(f"'{known_name}'" for known_name in names)
            raise ValueError(f"'{name}' is no option of layers {layers}, wiring '{preset}': it takes {listed}.")
    if PRESETS[preset].whole_layers and ":" in layers:
        raise ValueError(
            f"'{preset}' joins the attention and the MLP of a layer: it cannot cover only one of them ({layers})."
        )
    for option in PRESETS[preset].options:
        if option.default is None and option.name not in given:
            words = option.name.replace("_", " ")
            raise ValueError(
                f"'{preset}' layers {layers} need a {words}: give {option.wanted}, as {option.name} in a "
                f"file, or as {preset}{option.text.format(option.metavar)} in a text."
            )
    for option in known:
        if option.name in given and not option.is_valid(given[option.name]):
            value = given[option.name]
            raise ValueError(f"'{option.name}' of layers {layers} is {value!r}: it must be {option.wanted}.")


def parse_regions(entries: Sequence[Mapping[str, Any]] | None, num_layers: int) -> list[Region]:
    """Regions from their JSON form, checked, sorted, and with every layer that is not named as `standard`.

    Raises ValueError when an entry is malformed or two regions overlap.
    """
    if not isinstance(entries, list | tuple | None):
        raise ValueError(f"wiring {entries!r} is not a list of regions.")
    return complete([parse_region(entry, num_layers) for entry in entries or []], num_layers)


def parse_region(entry: Mapping[str, Any], num_layers: int) -> Region:
    """A region from its JSON form, checked. Raises ValueError."""
    if not isinstance(entry, Mapping) or not {"layers", "preset"} <= set(entry):
        raise ValueError(f"A wiring entry needs 'layers' and 'preset', this one has {entry!r}.")
    options = {name: value for name, value in entry.items() if name not in ("layers", "preset")}
    return make_region(str(entry["layers"]), entry["preset"], num_layers, **options)


def complete(regions: Sequence[Region], num_layers: int) -> list[Region]:
    """`regions` in order, with all other modules as `standard`. Raises ValueError when two overlap."""
    owner: dict[int, Region] = {}
    for region in regions:
        for index in region.module_indices:
            if index in owner:
                raise ValueError(
                    f"Layer {index // 2} is named twice, by '{owner[index].preset}' layers {owner[index].layers} "
                    f"and by '{region.preset}' layers {region.layers}: give each module one wiring."
                )
            owner[index] = region
    rewired = [region for region in regions if not region.is_dense]
    dense = set(range(2 * num_layers)).difference(*(region.module_indices for region in rewired))
    fill = [make_region(str(layer_range), STANDARD, num_layers) for layer_range in as_ranges(dense)]
    return sorted(rewired + fill, key=lambda region: min(region.module_indices))


@dataclass(frozen=True)
class LayerRange:
    """Layers `start` to `stop - 1`, or only their attention or only their MLP."""

    start: int
    stop: int
    module: str = "both"  # or attn, or mlp

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
    return LayerRange(start, stop, module or "both")


def _layers(num_layers: int) -> str:
    return f"layers 0 to {num_layers - 1}" if num_layers > 1 else "layer 0 alone"


def as_ranges(indices: Iterable[int]) -> list[LayerRange]:
    """The fewest ranges that cover these module indices."""
    covered = set(indices)
    ranges: list[LayerRange] = []
    for layer in sorted({index // 2 for index in covered}):
        module = "both" if {2 * layer, 2 * layer + 1} <= covered else "attn" if 2 * layer in covered else "mlp"
        if ranges and ranges[-1].stop == layer and ranges[-1].module == module:
            ranges[-1] = replace(ranges[-1], stop=layer + 1)
        else:
            ranges.append(LayerRange(layer, layer + 1, module))
    return ranges


def ranges_of_layers(layers: Iterable[int]) -> list[LayerRange]:
    """The fewest ranges that cover these layers, both modules of each."""
    return as_ranges(index for layer in layers for index in LayerRange(layer, layer + 1).module_indices)
