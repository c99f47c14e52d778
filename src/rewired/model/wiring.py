"""The wiring: which module waits, peeks and reduces what. The one table of the project, without torch.

A wiring is a list of regions, as `config.json` holds it:

    [{"layers": "0-16", "preset": "standard"},
     {"layers": "16-32", "preset": "ladder", "peek": true}]

`resolve` turns it into one `ModuleWiring` for each of the model's 2 * num_layers modules (attention, MLP,
attention, ...). Everything else in the project reads those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .layer_ranges import LayerRange, as_ranges, parse_layers

Reduce = Literal["all", "none", "shared"]
Merge = Literal["sum", "mean"]
InitialGain = Literal["one", "sqrt_shards"]


@dataclass(frozen=True)
class Preset:
    """A paper's architecture as answers to the three questions; `source` says where it comes from."""

    source: str
    overlap: bool = False
    peek: bool = False


PRESETS: dict[str, Preset] = {
    "standard": Preset("Megatron TP"),
    "parallel": Preset("PaLM block; Ladder Residual, section 3.3.1"),
    "ladder": Preset("Ladder Residual, Algorithm 1 and equation 2", overlap=True),
    "desync": Preset("Ladder Residual, section 5", peek=True),
    "partial": Preset("CAAT-Net, equations 8, 12, 20 and 22", peek=True),
}


@dataclass(frozen=True)
class Region:
    """Ranges of layers that share a preset and its modifiers. Each range counts and flushes for itself."""

    ranges: tuple[LayerRange, ...]
    preset: str
    every: int = 2  # desync: the last of each `every` modules reduces
    shared_fraction: float = 1.0  # partial: the first floor(shared_fraction * hidden_size) channels are reduced
    merge: Merge = "sum"  # how local parts are folded into a reduction
    peek: bool = False
    overlap: bool = False
    initial_gain: InitialGain = "one"

    @property
    def is_dense(self) -> bool:
        return self.preset == "standard" and not (self.peek or self.overlap)

    @property
    def layers(self) -> str:
        return ",".join(str(layer_range) for layer_range in self.ranges)

    @property
    def module_indices(self) -> list[int]:
        return [index for layer_range in self.ranges for index in layer_range.module_indices]

    def describe(self) -> str:
        """The wiring in a few words: `ladder + peek`, `desync-4x`, `partial 0.5 (mean)`."""
        number = {"desync": f"-{self.every}x", "partial": f" {self.shared_fraction:g}"}.get(self.preset, "")
        merge = " (mean)" if self.merge == "mean" else ""
        defaults = PRESETS[self.preset]
        modifiers = [("peek", self.peek, defaults.peek), ("overlap", self.overlap, defaults.overlap)]
        changed = [f" {'+' if value else '-'} {name}" for name, value, default in modifiers if value != default]
        return self.preset + number + merge + "".join(changed)


@dataclass(frozen=True)
class ModuleWiring:
    """The three answers for one module, and what follows from them for its neighbours.

    `wait`: read the update in flight; else the stale stream. `reduce`: what of the output is reduced at the write.
    `reads_shards`: the view differs per shard, because it holds own parts that are not reduced yet.
    `gives_partials`: the output is needed shard by shard, not only summed.
    `keeps_payload`: the next module peeks at what this one put into its reduction.
    `lacks_something`: its view is not all that was contributed so far.
    """

    region: Region
    wait: bool
    reduce: Reduce
    merge: Merge
    shared_channels: int  # how many channels of the output are reduced
    reads_shards: bool = False
    gives_partials: bool = False
    keeps_payload: bool = False
    overlapped: bool = False  # its reduction runs behind the next module
    lacks_something: bool = False

    @property
    def launches(self) -> bool:
        """Whether a collective starts after this module."""
        return self.reduce != "none"

    @property
    def is_rewired(self) -> bool:
        """Whether it computes something else than in a dense model: by its own wiring, or by what others left."""
        return self.lacks_something or not self.region.is_dense

    @property
    def depends_on_shards(self) -> bool:
        """Whether the model's function depends on the number of shards here."""
        return self.reads_shards or self.merge == "mean"


def make_region(layers: str, preset: str, num_layers: int, /, **options: Any) -> Region:
    """A checked region. An option that is None takes the preset's default. Raises ValueError."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"'{preset}' is not a wiring: choose one of {', '.join(PRESETS)}.")
    options = {name: value for name, value in options.items() if value is not None}
    _check_options(layers, preset, options)
    defaults = {"peek": PRESETS[preset].peek, "overlap": PRESETS[preset].overlap}
    return Region(parse_layers(layers, num_layers), preset, **(defaults | options))


def _check_options(layers: str, preset: str, options: Mapping[str, Any]) -> None:
    allowed = {"peek", "overlap", "initial_gain"}
    allowed |= {"desync": {"every", "merge"}, "partial": {"shared_fraction", "merge"}}.get(preset, set())
    for name in options:
        if name not in allowed:
            raise ValueError(
                f"'{name}' is no option of layers {layers}, wiring '{preset}': it takes {_listed(allowed)}."
            )
    if preset == "parallel" and ":" in layers:
        raise ValueError(
            f"'parallel' joins the attention and the MLP of a layer: it cannot cover only one of them ({layers})."
        )
    if preset == "partial" and "shared_fraction" not in options:
        raise ValueError(
            f"'partial' layers {layers} need a shared fraction: say which part of the channels is reduced."
        )
    for name, check, wanted in _OPTION_CHECKS:
        if name in options and not check(options[name]):
            raise ValueError(f"'{name}' of layers {layers} is {options[name]!r}: it must be {wanted}.")


_OPTION_CHECKS = (
    ("every", lambda v: type(v) is int and v >= 2, "an integer of at least 2"),
    ("shared_fraction", lambda v: type(v) in (int, float) and 0 <= v <= 1, "a number from 0 to 1"),
    ("merge", lambda v: v in ("sum", "mean"), "'sum' or 'mean'"),
    ("peek", lambda v: type(v) is bool, "true or false"),
    ("overlap", lambda v: type(v) is bool, "true or false"),
    ("initial_gain", lambda v: v in ("one", "sqrt_shards"), "'one' or 'sqrt_shards'"),
)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))


def parse_wiring(entries: Sequence[Mapping[str, Any]] | None, num_layers: int) -> list[Region]:
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
    fill = [Region((layer_range,), "standard") for layer_range in as_ranges(dense)]
    return sorted(rewired + fill, key=lambda region: min(region.module_indices))


def wiring_to_json(regions: Iterable[Region]) -> list[dict[str, Any]]:
    """The JSON form: `layers`, `preset`, and only those options that matter there or differ from the preset's."""
    entries = []
    for region in regions:
        preset = PRESETS[region.preset]
        entry: dict[str, Any] = {"layers": region.layers, "preset": region.preset}
        if region.preset == "desync":
            entry["every"] = region.every
        if region.preset == "partial":
            entry["shared_fraction"] = region.shared_fraction
        if region.preset in ("desync", "partial"):
            entry["merge"] = region.merge
        if region.peek != preset.peek:
            entry["peek"] = region.peek
        if region.overlap != preset.overlap:
            entry["overlap"] = region.overlap
        if region.initial_gain != "one":
            entry["initial_gain"] = region.initial_gain
        entries.append(entry)
    return entries


def resolve(regions: Iterable[Region], num_layers: int, hidden_size: int) -> list[ModuleWiring]:
    """One `ModuleWiring` a module, 2 * num_layers of them, in the order in which the model runs them."""
    modules: list[ModuleWiring | None] = [None] * (2 * num_layers)
    for region in regions:
        for layer_range in region.ranges:
            indices = layer_range.module_indices
            for position, index in enumerate(indices):
                is_last = position == len(indices) - 1 or index == 2 * num_layers - 1
                modules[index] = _answers(region, position, is_last, hidden_size)
    return _follow_the_stream([module for module in modules if module is not None])


def _answers(region: Region, position: int, is_last: bool, hidden_size: int) -> ModuleWiring:
    reduce: Reduce = "all"
    channels = hidden_size
    every = {"parallel": 2, "desync": region.every}.get(region.preset)
    if every and not is_last and position % every != every - 1:
        reduce, channels = "none", 0
    elif region.preset == "partial" and not is_last:
        channels = math.floor(region.shared_fraction * hidden_size)
        reduce = "none" if channels == 0 else "all" if channels == hidden_size else "shared"
    return ModuleWiring(region, wait=not region.overlap, reduce=reduce, merge=region.merge, shared_channels=channels)


def _follow_the_stream(modules: list[ModuleWiring]) -> list[ModuleWiring]:
    """Walk the modules once, tracking what is in flight and what is local, and note what each one meets."""
    resolved: list[ModuleWiring] = []
    in_flight = False
    local_from: Region | None = None
    for module in modules:
        peeks_at_flight = module.region.peek and in_flight and not module.wait
        if in_flight:
            before = resolved[-1]
            resolved[-1] = replace(
                before,
                overlapped=not module.wait,
                keeps_payload=peeks_at_flight,
                gives_partials=before.gives_partials or peeks_at_flight,
            )
        reads_shards = peeks_at_flight or (module.region.peek and local_from is not None)
        # whoever folds the local parts does it the way of the region that left them
        merge = local_from.merge if local_from and module.reduce == "all" else "sum"
        lacks_something = local_from is not None or (in_flight and not module.wait)
        resolved.append(
            replace(
                module,
                reads_shards=reads_shards,
                merge=merge,
                gives_partials=module.reduce != "all",
                lacks_something=lacks_something,
            )
        )
        if module.reduce == "all":
            local_from = None
        elif local_from and local_from.merge != module.region.merge:
            raise ValueError(
                f"Layers {local_from.layers} merge by '{local_from.merge}' and layers {module.region.layers} by "
                f"'{module.region.merge}', and their local parts mix: give both the same merge."
            )
        else:
            local_from = module.region
        in_flight = module.launches
    return resolved


def check_shards(shards: int, name: str = "tp_shards", **sizes: int) -> None:
    """Raise ValueError naming the first of `sizes` (heads, KV heads, MLP width) that `shards` does not divide."""
    if type(shards) is not int or shards < 1:
        raise ValueError(f"{name} is {shards!r}: it must be an integer of at least 1.")
    for size_name, size in sizes.items():
        if size % shards:
            raise ValueError(f"{name} {shards} does not divide {size_name} {size}: choose a number that does.")
