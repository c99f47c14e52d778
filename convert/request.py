"""What is asked of a conversion, and what it will do about it: the plan, before any tensor is touched."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from rewired.checkpoint.checkpoint import Checkpoint, gain_names
from rewired.checkpoint.llama import AUTHORS_LADDER
from rewired.model.regions import Region
from rewired.model.wiring import ModuleWiring, Wiring
from rewired.refit.cost import Cost
from rewired.refit.request import RefitRequest
from rewired.sources import Source

from .traffic import LayerTable

_MOST_RANGES = 4  # that a default name spells out


@dataclass(frozen=True)
class Request:
    """What to make of a checkpoint: wiring entries in their JSON form, and how to write the result."""

    wiring: Sequence[Mapping[str, Any]] = ()
    tp_shards: int | None = None
    to_llama: bool = False
    dtype: str | None = None
    copy: bool = False
    refit: RefitRequest | None = None
    command: str = "rewired.convert.convert(...)"  # what the model card names as the command that made it


@dataclass(frozen=True)
class Plan:
    """The new wiring, and what a reader should know about it."""

    wiring: Wiring
    tp_shards: int
    table: LayerTable
    notes: list[str]
    cost: Cost | None = None  # of the refit that is asked for


def make_plan(checkpoint: Checkpoint, request: Request) -> Plan:
    """The wiring that `request` makes of `checkpoint`. Raises ValueError when it does not fit the model."""
    shape = checkpoint.shape
    if not (request.wiring or request.to_llama or checkpoint.is_rewired or request.refit):
        raise ValueError("Nothing to rewire: say which layers, for example --ladder-layers 16-32.")
    wiring = checkpoint.wiring.rewire(request.wiring)
    if request.to_llama and wiring.rewired_regions:
        raise ValueError("--to-llama writes a dense Llama, and some layers are rewired: add --standard-layers 0-.")
    tp_shards = next(r for r in (request.tp_shards, checkpoint.tp_shards, shape.default_shards()) if r is not None)
    shape.check_shards(tp_shards)
    _check_trained(checkpoint, request, wiring)
    is_refitted = _check_refitted(checkpoint, request, wiring, tp_shards)
    notes, cost = _notes(checkpoint, request, wiring, tp_shards), None
    if request.refit and is_refitted:
        notes.append("The source is refitted already: its weights stay as they are.")
    elif request.refit and not wiring.rewired_regions:
        notes.append("No layer is rewired, so there is nothing to refit: the weights stay as they are.")
    elif request.refit:
        notes += _check_fit(checkpoint, request.refit, wiring)
        cost = Cost.of(shape, wiring, tp_shards, request.refit.tokens, request.refit.matrices)
    table = LayerTable.of(wiring, tp_shards, request.dtype or checkpoint.dtype)
    return Plan(wiring, tp_shards, table, notes, cost)


def _check_trained(checkpoint: Checkpoint, request: Request, wiring: Wiring) -> None:
    """Raise ValueError for what only the original's weights are good for, where `adapt` has trained them."""
    record = checkpoint.config.get("adapted")
    if not isinstance(record, dict):
        return
    pairs = zip(checkpoint.wiring.modules, wiring.modules, strict=True)
    loses_a_wiring = any(old.is_rewired and not new.is_rewired for old, new in pairs)
    if loses_a_wiring or request.refit:
        raise ValueError(
            f"{checkpoint.folder} was trained as it is wired, and its weights are no longer the original's: convert "
            f"the base that they were made from instead, {_base(record)}."
        )


def _check_refitted(checkpoint: Checkpoint, request: Request, wiring: Wiring, tp_shards: int) -> bool:
    """Whether the weights were refitted. Raises ValueError if they were, to another wiring or other gains than those
    wanted."""
    record = checkpoint.config.get("refit")
    if not isinstance(record, dict):
        return False
    fitted = checkpoint.shape.wiring(record["wiring"]) if "wiring" in record else checkpoint.wiring
    before, after = (list(map(_function, each.modules)) for each in (fitted, wiring))
    is_rewired = [module.is_rewired for module in fitted.modules]
    other_shards = tp_shards != checkpoint.tp_shards and fitted.depends_on_shards
    changes_fitted = other_shards or list(compress(before, is_rewired)) != list(compress(after, is_rewired))
    if changes_fitted or (request.refit and before != after):
        raise ValueError(
            f"{checkpoint.folder} was refitted to its wiring, and its weights are no longer the original's: convert "
            f"the base that they were made from instead, {_base(record)}."
        )
    if request.refit and request.refit.gains:
        raise ValueError(
            f"{checkpoint.folder} was refitted to the gains that it has: --calibrate the base that it was made from, "
            f"{_base(record)}."
        )
    return True


def _base(record: Mapping[str, Any]) -> Any:
    """The name of the original, in the config's `record` of a fit or a training."""
    base = record.get("base")
    return base.get("name") if isinstance(base, Mapping) else base


def check_gains(checkpoint: Checkpoint, stored: Collection[str], wiring: Wiring, tp_shards: int) -> None:
    """Raise ValueError where a gain that is `stored` would be one of something else; new modules get new ones."""
    before, after = map(_gained, (checkpoint.wiring, wiring))
    if stored and (tp_shards != checkpoint.tp_shards or any(before.get(name) != after.get(name) for name in stored)):
        records = [checkpoint.config[name] for name in ("adapted", "refit", "calibrated") if name in checkpoint.config]
        base = f"{_base(records[0])}, which it was made from" if records else "the model that it was trained from"
        raise ValueError(
            f"{checkpoint.folder} holds gains (*_gain.weight) of its present wiring, and this would change it there: "
            f"name other layers, or convert {base}."
        )


def _gained(wiring: Wiring) -> dict[str, tuple[Any, ...]]:
    """What each module that has a gain computes by."""
    return dict(zip(gain_names(wiring), (_function(m) for m in wiring.modules if m.reads_shards), strict=True))


def _check_fit(checkpoint: Checkpoint, request: RefitRequest, wiring: Wiring) -> list[str]:
    """What to know of the original that is fitted to. Raises ValueError where there is none, or no gain to fit."""
    if request.gains and not any(module.reads_shards for module in wiring.modules):
        raise ValueError("--calibrate fits the gains of modules that peek, and none does: add --peek, or take --refit.")
    if checkpoint.config["model_type"] == AUTHORS_LADDER:
        raise ValueError(
            f"{checkpoint.folder} was trained as a ladder, so there is no dense original to fit it to: convert it "
            "without --refit and --calibrate."
        )
    if checkpoint.is_rewired:
        return [
            "For the original, its weights are read as those of a dense model: right unless it was trained rewired."
        ]
    return []


def _function(module: ModuleWiring) -> tuple[Any, ...]:
    """What a module computes by; how its all-reduce runs is no part of it."""
    reads = (module.wait, module.reads_shards, module.lacks_something, module.region.peek, module.region.initial_gain)
    return (*reads, module.reduce, module.merge, module.shared_channels)


def _notes(checkpoint: Checkpoint, request: Request, wiring: Wiring, tp_shards: int) -> list[str]:
    shape = checkpoint.shape
    heads, kv_heads, width = shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size
    if request.tp_shards:
        why = "as you asked"
    elif checkpoint.tp_shards:
        why = "as the source has it"
    else:
        why = f"the largest number up to 8 that divides {heads} heads, {kv_heads} KV heads and MLP width {width}"
    if wiring.depends_on_shards:
        meaning = (
            "this wiring's function depends on it: the model computes the same on any number of GPUs that divides it"
        )
    else:
        meaning = "this wiring computes the same function at any number"
    return [f"tp_shards {tp_shards} ({why}); {meaning}."]


def default_name(source: Source, checkpoint: Checkpoint, request: Request) -> str:
    """A name that says what was done: `llama-3.1-8b-ladder-16-32`."""
    named = checkpoint.shape.wiring(request.wiring).rewired_regions
    parts = [_slug(region) for region in named]
    if request.refit and (named or checkpoint.is_rewired):
        parts.append("refit" if request.refit.matrices else "calibrated")
    if not parts:
        parts = ["llama" if request.to_llama else "standard" if request.wiring else "rewired"]
    return "-".join([source.name, *parts])


def _slug(region: Region) -> str:
    """A region in a file name: `ladder-peek-16-32`, `desync-4x-8-16`, `partial-0.5-0-4_8-12`, `ladder-20-layers`."""
    layers = region.layers
    if len(region.ranges) > _MOST_RANGES:
        layers = f"{len({index // 2 for index in region.module_indices})} layers"
    words = f"{region.describe()} {layers}".replace(" + ", "-").replace(" - ", "-no-")
    return re.sub(r"[^\w.-]+", "-", words.replace(",", "_")).strip("-")
