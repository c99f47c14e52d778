"""The refit as a step of a conversion: text and disk space checked beforehand, its result recorded in the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.safetensors_header import cast_size, check_types
from rewired.refit.cost import Cost
from rewired.refit.request import RefitRequest

from .destination import check_space
from .job import Job

if TYPE_CHECKING:
    from rewired.refit.run import RefitResult

OnLayer = Callable[[int, int, list[Any]], None]  # hears of a layer that is done, how many there are, and its fits


def check_text(request: RefitRequest, checkpoint: Checkpoint | None) -> None:
    """Raise ValueError for a text that cannot be used, before anything is downloaded.

    Where there is a `checkpoint`, the text is read as its tokenizer does.
    """
    from rewired.text.documents import check

    check(request.text)
    if checkpoint:
        from rewired.refit.run import load_text

        load_text(checkpoint.config, checkpoint.folder, request.text, request.tokens)


def fit(
    job: Job, config: Mapping[str, Any], work: Path, on_layer: OnLayer, on_cost: Callable[[Cost], None]
) -> RefitResult:
    """Fit the rewired layers, as `config` wires them, and leave their tensors in `work`."""
    from rewired.refit.run import refit

    request, wiring = job.request.refit, job.plan.wiring
    assert request is not None, "a plan with a cost was asked for a refit"
    _check_room(job)

    def on_start(tokens: int) -> None:  # a text may have fewer than were asked for
        on_cost(Cost.of(job.checkpoint.shape, wiring, job.plan.tp_shards, tokens, request.matrices))

    return refit(config, job.checkpoint.folder, job.files, job.request.dtype, request, work, on_layer, on_start)


def _check_room(job: Job) -> None:
    """Raise ValueError where layers that change cannot be fitted, or do not fit on the disk beside the output."""
    rewired, dtype = job.plan.wiring.rewired_layers, job.request.dtype
    layers = range(rewired[0], job.plan.wiring.num_layers) if dtype else rewired  # a new dtype changes those above, too
    family = job.checkpoint.shape.family
    prefixes = tuple(f"{family.layer(index)}." for index in layers)
    changing = [info for name, info in job.tensors.items() if name.startswith(prefixes)]
    check_types(changing, dtype)
    files = {info.file for info in changing}
    written = [info for info in job.tensors.values() if dtype or info.file in files]
    check_space(job.out, cast_size([*written, *changing], dtype))


def record(outcome: RefitResult, job: Job, config: Mapping[str, Any], revision: str | None) -> dict[str, Any]:
    """`config` with a record of the fit. Where gains are fitted anew, it replaces the record of their earlier fit."""
    earlier = config.get("calibrated") if outcome.request.gains else None
    base = earlier["base"] if earlier else provenance.record(job.source, job.checkpoint.folder, revision)
    kind = "refit" if outcome.request.matrices else "calibrated"
    others = {name: value for name, value in config.items() if not (earlier and name == "calibrated")}
    return others | {kind: outcome.record(base, job.plan.wiring.to_json())}


def notes_on_making(config: Mapping[str, Any]) -> list[str]:
    """What these weights were made from, and how they were fitted and trained, as far as the `config` records it."""
    base, training = provenance.base_of(config), config.get(provenance.TRAINED)
    notes = [f"Its weights were made from those of {base['name']}."] if base else []
    if base and provenance.FROM_SCRATCH in base:
        notes = ["Trained from scratch: its first weights were random."]
    notes += notes_on_fits(config)
    for wiring in config.get(provenance.AGAIN, {"before": []})["before"]:
        notes.append(f"Before, it was {wiring}.")
    if training:
        notes.append(f"Trained on {provenance.trained_tokens(training):,} tokens.")
    return notes


def notes_on_fits(config: Mapping[str, Any]) -> list[str]:
    """The notes of every fit of these weights, and a warning where the weights or the wiring changed since."""
    notes = list[str]()
    fits = [config[kind] for kind in ("calibrated", "refit") if kind in config]
    for fit in fits:
        notes += fit["notes"]
        if fit is not fits[-1] or fit["wiring"] != config["wiring"]:
            notes.append("More was changed after that KL was measured: `evaluate` tells what it is now.")
    return notes
