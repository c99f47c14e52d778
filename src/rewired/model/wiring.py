"""The wiring of a model: which of its modules waits, peeks, and reduces what. Without torch.

A `Wiring` turns regions of layers into one `ModuleWiring` for each of the model's 2 * num_layers modules (attention,
MLP, attention, ...). Everything else in the project reads those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .payload import FULL, OF_LAST_MODULE, Sections, keeps_channels, make_sections, packed_bytes
from .presets import PRESETS
from .regions import Region, complete, parse_region, parse_regions

Reduce = Literal["all", "none", "shared"]


@dataclass(frozen=True)
class Wiring:
    """Regions that cover every layer of a model once, and what follows from them for each module.

    Raises ValueError when the local parts of two regions mix that are merged in different ways.
    """

    regions: tuple[Region, ...]
    num_layers: int
    hidden_size: int
    modules: tuple[ModuleWiring, ...] = field(init=False, repr=False, compare=False)  # in the order they run

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", tuple(_resolve(self.regions, self.num_layers, self.hidden_size)))

    @classmethod
    def from_json(cls, entries: Sequence[Mapping[str, Any]] | None, num_layers: int, hidden_size: int) -> Wiring:
        """The wiring that `config.json` holds as `entries`; layers that none of them names are `standard`.

        Raises ValueError when an entry is malformed or two of them name the same module.
        """
        return cls(tuple(parse_regions(entries, num_layers)), num_layers, hidden_size)

    @classmethod
    def dense(cls, num_layers: int, hidden_size: int) -> Wiring:
        """The wiring of a stock Llama."""
        return cls.from_json([], num_layers, hidden_size)

    def to_json(self) -> list[dict[str, Any]]:
        return [region.to_json() for region in self.regions]

    def rewire(self, entries: Iterable[Mapping[str, Any]]) -> Wiring:
        """The wiring after `entries` (JSON form) took the layers that they name; the others keep theirs.

        Raises ValueError when an entry is malformed, when two of them name the same module, or when what they leave of
        a region is none.
        """
        new = [parse_region(entry, self.num_layers) for entry in entries]
        complete(new, self.num_layers)  # refuses entries that overlap
        taken = {index for region in new for index in region.module_indices}
        kept = [region.without(taken) for region in self.rewired_regions]
        regions = complete([region for region in kept if region.ranges] + new, self.num_layers)
        return Wiring(tuple(regions), self.num_layers, self.hidden_size)

    @property
    def layers(self) -> list[tuple[ModuleWiring, ModuleWiring]]:
        """The attention's and the MLP's wiring of every layer."""
        return list(zip(self.modules[::2], self.modules[1::2], strict=True))

    @property
    def rewired_regions(self) -> list[Region]:
        return [region for region in self.regions if not region.is_dense]

    @property
    def rewired_layers(self) -> list[int]:
        """The layers that compute something else than in a dense model."""
        return [index for index, modules in enumerate(self.layers) if any(module.is_rewired for module in modules)]

    @property
    def exposed(self) -> int:
        """How many all-reduces a token waits for."""
        return sum(module.is_exposed for module in self.modules)

    @property
    def depends_on_shards(self) -> bool:
        """Whether the model computes something else with another number of logical shards."""
        return any(module.depends_on_shards for module in self.modules)


@dataclass(frozen=True)
class ModuleWiring:
    """The four answers for one module, and what follows from them for its neighbours.

    `delay`: how many updates late it reads the stream; 0 waits. `reduce`: what of the output is reduced at the write.
    `late`: how many updates are in flight when it has read. `keeps`: how many of these its write leaves there.
    `sections`: what that reduction sends, quantised; empty where it sends what there is.
    `reads_shards`: the view differs per shard, because it holds own parts that are not reduced yet.
    `keeps_rest`: what rounding leaves of them stays local until the next reduction.
    `gives_partials`: the output is needed shard by shard, not only summed.
    `keeps_payload`: a module that reads its update late peeks at what this one put into its reduction.
    `hides_behind`: how many modules run while its reduction is in flight.
    `lacks_something`: its view is not all that was contributed so far, rounding aside.
    """

    region: Region
    delay: int
    reduce: Reduce
    merge: str
    shared_channels: int  # how many channels of the output are reduced
    sections: Sections = ()
    keeps_rest: bool = False
    reads_shards: bool = False
    gives_partials: bool = False
    keeps_payload: bool = False
    late: int = 0
    keeps: int = 0
    hides_behind: int = 0
    lacks_something: bool = False

    @property
    def wait(self) -> bool:
        """Whether it reads all that was reduced before it."""
        return self.delay == 0

    @property
    def overlapped(self) -> bool:
        """Whether its reduction runs behind the next module."""
        return self.hides_behind > 0

    @property
    def launches(self) -> bool:
        """Whether a collective starts after this module."""
        return self.reduce != "none"

    @property
    def takes_local(self) -> bool:
        """Whether its reduction takes along what is local of the channels that it sends."""
        return self.reduce == "all" or bool(self.sections)

    @property
    def leaves_channels(self) -> bool:
        """Whether its reduction leaves the last channels to each shard."""
        return self.reduce == "shared"

    @property
    def is_exposed(self) -> bool:
        """Whether a collective starts after this module and is waited for at once."""
        return self.launches and not self.overlapped

    @property
    def is_rewired(self) -> bool:
        """Whether it computes something else than in a dense model: by its own wiring, or by what others left."""
        return self.lacks_something or not self.region.is_dense

    @property
    def depends_on_shards(self) -> bool:
        """Whether the model's function depends on the number of shards here."""
        return self.reads_shards or self.merge == "mean" or bool(self.sections)

    def payload_bytes(self, item_bytes: int) -> int:
        """How many bytes a token its reduction carries, where activations have `item_bytes` each: `packed_bytes`."""
        return packed_bytes(self.sections) if self.sections else self.shared_channels * item_bytes


def _resolve(regions: Iterable[Region], num_layers: int, hidden_size: int) -> list[ModuleWiring]:
    """One `ModuleWiring` a module, in the order in which the model runs them."""
    modules: dict[int, ModuleWiring] = {}
    for region in regions:
        for layer_range in region.ranges:
            indices = layer_range.module_indices
            for position, index in enumerate(indices):
                ends_model = index == 2 * num_layers - 1
                is_last = position == len(indices) - 1 or ends_model
                share = 1 if is_last else PRESETS[region.preset].share(position, region.options)
                payload = OF_LAST_MODULE if ends_model and region.payload != FULL else region.payload
                modules[index] = _answers(region, payload, math.floor(share * hidden_size), hidden_size, is_last)
    return _follow_the_stream([modules[index] for index in range(2 * num_layers)])


def _answers(region: Region, payload: str, channels: int, hidden_size: int, is_last: bool) -> ModuleWiring:
    if channels == 0 and keeps_channels(payload):
        raise ValueError(
            f"'{region.preset}' layers {region.layers} reduce nothing after some modules, so their payload cannot keep "
            "channels local, too: give no channels 0 bits."
        )
    sections = make_sections(payload, channels, hidden_size, is_last)
    channels = sum(section.channels for section in sections) if payload != FULL else channels
    reduce: Reduce = "none" if channels == 0 else "all" if channels == hidden_size else "shared"
    return ModuleWiring(
        region,
        delay=region.delay,
        reduce=reduce,
        merge=region.merge,
        shared_channels=channels,
        sections=sections,
        keeps_rest=bool(sections) and not is_last,
    )


def _follow_the_stream(modules: Sequence[ModuleWiring]) -> list[ModuleWiring]:
    """Note what each module meets: what is in flight, and what is local since earlier."""
    late, kept, readers = _follow_updates(modules)
    resolved: list[ModuleWiring] = []
    local_from: Region | None = None  # the region that left what no reduction has taken yet
    for index, module in enumerate(modules):
        keeps_payload = any(modules[reader].region.peek for reader in readers[index])
        resolved.append(
            replace(
                module,
                reads_shards=module.region.peek and (late[index] > 0 or local_from is not None),
                # whoever folds the local parts does it the way of the region that left them
                merge=local_from.merge if local_from and module.takes_local else "sum",
                gives_partials=module.reduce != "all" or bool(module.sections) or keeps_payload,
                keeps_payload=keeps_payload,
                late=late[index],
                keeps=len(kept[index]),
                hides_behind=len(readers[index]),
                lacks_something=late[index] > 0 or (index > 0 and modules[index - 1].reduce != "all"),
            )
        )
        if module.reduce != "all" and local_from:
            _check_same_merge(local_from, module.region)
        coming = (modules[launcher].region for launcher in kept[index] if modules[launcher].keeps_rest)
        local_from = module.region if module.reduce != "all" or module.keeps_rest else next(coming, None)
    return resolved


def _follow_updates(modules: Sequence[ModuleWiring]) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """How many updates each module reads late, whose stay in flight across its write, and who reads its own late."""
    late, kept, readers = list[int](), list[list[int]](), [list[int]() for _ in modules]
    in_flight: list[int] = []  # the modules that launched them
    for index, module in enumerate(modules):
        in_flight = [launcher for launcher in in_flight if launcher >= index - module.delay]
        late.append(len(in_flight))
        for launcher in in_flight:
            readers[launcher].append(index)
        # what rounding has left must have come back before a region's last reduction
        ends = index == len(modules) - 1 or (bool(module.sections) and not module.keeps_rest)
        leaves = 0 if ends else modules[index + 1].delay
        in_flight = [launcher for launcher in in_flight if launcher > index - leaves]
        kept.append(in_flight)
        in_flight = [*in_flight, index] if module.launches else in_flight
    return late, kept, readers


def _check_same_merge(before: Region, region: Region) -> None:
    if before.merge != region.merge:
        raise ValueError(
            f"Layers {before.layers} merge by '{before.merge}' and layers {region.layers} by '{region.merge}', and "
            "their local parts mix: give both the same merge."
        )
