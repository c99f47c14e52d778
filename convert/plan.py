"""The plan of a conversion: the new wiring, checked against the model before any tensor is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.kv_heads import copies_in, note_on_copies, with_copies
from rewired.checkpoint.quantised import schemes
from rewired.model.wiring import Wiring
from rewired.quantities import count
from rewired.refit.cost import Cost
from rewired.refit.request import RefitRequest

from .changed_weights import check_quantised, check_weights, differ_only_in_bits, record_of_wirings
from .request import Request
from .rotation import plan_rotation
from .traffic import LayerTable, notes_on_ranks


@dataclass(frozen=True)
class Plan:
    """The new wiring, its traffic, and notes on it for users and the model card."""

    wiring: Wiring
    tp_shards: int
    table: LayerTable
    notes: list[str]
    by_ranks: list[str]  # what each of usual numbers of ranks sends, for users
    is_damaged: bool  # whether modules newly miss something, and nothing is fitted to that
    is_quantised: bool = False
    is_changed: bool = False  # whether the source's weights are no longer the original's, which a refit needs
    kv_copies: int = 1  # how often each KV head of the source is written
    cost: Cost | None = None  # of the refit that is asked for
    rotation: dict[str, Any] | None = None  # what is known of the one that is asked for
    rewired_again: dict[str, Any] | None = None  # the record of the wirings that the weights were made for before


def make_plan(checkpoint: Checkpoint, request: Request) -> Plan:
    """The wiring that `request` makes of `checkpoint`. Raises ValueError when it does not fit the model."""
    copies = _copies(checkpoint, request)
    checkpoint = with_copies(checkpoint, copies)
    shape = checkpoint.shape
    if not (
        request.wiring or request.to_stock or copies > 1 or checkpoint.is_rewired or request.refit or request.rotate
    ):
        raise ValueError("Nothing to rewire: say which layers, for example --ladder-layers 16-32.")
    wiring = checkpoint.wiring.rewire(request.wiring)
    if request.to_stock and wiring.rewired_regions:
        raise ValueError("--to-stock writes a dense model, and some layers are rewired: add --standard-layers 0-.")
    tp_shards = checkpoint.shards(request.tp_shards)
    notes, cost = [note_on_shards(wiring, tp_shards, _why(checkpoint, request))], None
    if checkpoint.is_quantised:
        check_quantised(checkpoint, request, copies, tp_shards, wiring)
        notes.append(f"The weights stay as they are: {'; '.join(schemes(checkpoint.config))}.")
    rotation = plan_rotation(checkpoint, request, wiring)
    is_refitted = check_weights(checkpoint, wiring, tp_shards, request)
    again = record_of_wirings(checkpoint, wiring, tp_shards, request.retrain)
    if again:
        notes.append(f"The weights were made for another wiring ({again['before'][-1]}): train them for this one.")
    if copies > 1:
        notes.append(note_on_copies(shape, copies_in(checkpoint), tp_shards))
    if request.refit and is_refitted:
        notes.append("The source is refitted already, to this wiring: its weights are not fitted again.")
    elif request.refit and not wiring.rewired_regions:
        notes.append("No layer is rewired, so there is nothing to refit.")
    elif request.refit:
        notes += _check_fit(checkpoint, request.refit, wiring)
        cost = Cost.of(shape, wiring, tp_shards, request.refit.tokens, request.refit.matrices)
    dtype = request.dtype or checkpoint.dtype
    table, by_ranks = LayerTable.of(wiring, tp_shards, dtype), notes_on_ranks(wiring, shape, tp_shards, dtype)
    is_new = not (cost or again or differ_only_in_bits(checkpoint.wiring, wiring))
    is_damaged = is_new and any(module.lacks_something for module in wiring.modules)
    is_changed = provenance.base_of(checkpoint.config) is not None
    return Plan(
        wiring, tp_shards, table, notes, by_ranks, is_damaged, checkpoint.is_quantised, is_changed, copies, cost,
        rotation, again,
    )  # fmt: skip


def _copies(checkpoint: Checkpoint, request: Request) -> int:
    """How often each KV head is written: more than once where more shards are asked for than there are."""
    before = checkpoint.shape
    return before.for_shards(request.tp_shards or 1).num_key_value_heads // before.num_key_value_heads


def _check_fit(checkpoint: Checkpoint, request: RefitRequest, wiring: Wiring) -> list[str]:
    """Notes on the original that is fitted to. Raises ValueError where there is none, or no gain to fit."""
    if request.gains and not any(module.reads_shards for module in wiring.modules):
        raise ValueError("--calibrate fits the gains of modules that peek, and none does: add --peek, or take --refit.")
    if checkpoint.is_rewired:
        return [
            "For the original, its weights are read as those of a dense model: right unless it was trained rewired."
        ]
    return []


def _why(checkpoint: Checkpoint, request: Request) -> str:
    if request.tp_shards:
        return "as you asked"
    if checkpoint.tp_shards:
        return "as the source has it"
    return f"the largest number up to 8 that divides {checkpoint.shape.family.divisible_in_words(checkpoint.shape)}"


def note_on_shards(wiring: Wiring, tp_shards: int, why: str = "") -> str:
    """For how many ranks a model is; `why` it is for so many may stand in brackets."""
    note = f"tp_shards {tp_shards}{f' ({why})' if why else ''}; this wiring"
    if not wiring.depends_on_shards:
        return f"{note} computes the same function at any number."
    return (
        f"{note}'s function depends on it, so it is for {count(tp_shards, 'rank')}; transformers also runs it on fewer "
        "that divide that. For another number convert the original with --tp-shards N."
    )
