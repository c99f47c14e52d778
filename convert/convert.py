"""The conversion: a checkpoint in, a rewired checkpoint out. The weights stay as they are; the wiring is metadata."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.dtypes import cast_size, check_types, parse_dtype
from rewired.checkpoint.safetensors_header import TensorInfo
from rewired.refit.cost import Cost
from rewired.refit.request import RefitRequest
from rewired.sources import find_source

from . import destination
from .request import Plan, Request, check_gains, default_name, make_plan
from .write import Job, new_config, write

if TYPE_CHECKING:
    from rewired.refit.run import Outcome


@dataclass(frozen=True)
class Conversion:
    """What was done or, in a dry run, what would be."""

    out: Path
    plan: Plan
    refit: Outcome | None = None


def convert(
    source: str | Path,
    out: str | Path | None = None,
    request: Request | None = None,
    *,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_layer: Callable[[int, int, list[Any]], None] = lambda layer, layers, fits: None,
    on_cost: Callable[[Cost], None] = lambda cost: None,
) -> Conversion:
    """Write `source`, rewired as `request` says, to the folder `out`; weights are linked where they can be.

    `on_bytes` hears how many bytes of weights were copied, `on_cost` what a refit that begins will take, and `on_layer`
    of each layer that it has done: its number, how many there are, and a `rewired.refit.fitting.Fit` for each of its
    modules that were fitted. What a refit had finished when it was interrupted is kept beside `out`, and the same call
    goes on with it. Raises ValueError with one sentence when the source, the request or the destination is unfit; then
    nothing is written.
    """
    request = request or Request()
    if request.dtype is not None:
        parse_dtype(request.dtype)
    found = find_source(str(source), revision)
    with tempfile.TemporaryDirectory(prefix="rewired-") as scratch:
        preview = Checkpoint.open(found.preview(Path(scratch)))
        plan = make_plan(preview, request)
        target = Path(out) if out else Path(default_name(found, preview, request))
        destination.check_free(target, found.folder, force)
        if plan.cost and request.refit:
            _check_text(request.refit, preview if dry_run and found.folder else None)
        if dry_run:
            if found.folder:
                _checked_tensors(preview, plan)
            return Conversion(target, plan)
    with destination.staged_folder(target) as staging:
        checkpoint = Checkpoint.open(found.fetch(request.dtype))
        tensors = _checked_tensors(checkpoint, plan)
        plan = replace(plan, notes=[*plan.notes, *_notes_on_weights(checkpoint, tensors, found.is_gguf)])
        job = Job(found, checkpoint, tensors, plan, request, target)
        config = new_config(job)
        work = target.with_name(f".{target.name}.refit")
        refitted = _refit(job, config, work, on_layer, on_cost) if plan.cost and request.refit else None
        if refitted:
            _record(refitted, job, config, revision)
        job = replace(job, plan=replace(plan, notes=[*plan.notes, *_notes_on_fits(config)]))
        write(job, config, refitted.files if refitted else {}, staging, on_bytes)
        destination.check_free(target, found.folder, force)  # it took time: something may have come there
    if refitted:
        shutil.rmtree(work)
    took = refitted.time() if refitted else []  # on no card: the same call gives the same folder
    return Conversion(target, replace(job.plan, notes=[*job.plan.notes, *took]), refitted)


def _check_text(request: RefitRequest, checkpoint: Checkpoint | None) -> None:
    """Before anything is downloaded; as the tokenizer of a `checkpoint` that is here reads it."""
    from rewired.text.documents import check

    check(request.text)
    if checkpoint:
        from rewired.refit.run import load_text

        load_text(checkpoint.config, checkpoint.folder, request.text, request.tokens)


def _refit(
    job: Job,
    config: Mapping[str, Any],
    work: Path,
    on_layer: Callable[[int, int, list[Any]], None],
    on_cost: Callable[[Cost], None],
) -> Outcome:
    """The tensors of the rewired layers, fitted anew."""
    from rewired.refit.run import refit

    asked, shape = job.request.refit, job.checkpoint.shape
    assert asked is not None
    rewired, dtype = job.plan.wiring.rewired_layers, job.request.dtype
    changed = range(rewired[0], shape.num_hidden_layers) if dtype else rewired  # a new dtype changes those above, too
    prefixes = tuple(f"model.layers.{index}." for index in changed)
    changing = [info for name, info in job.tensors.items() if name.startswith(prefixes)]
    check_types(changing, dtype)
    files = {info.file for info in changing}
    written = [info for info in job.tensors.values() if dtype or info.file in files]
    both = [*written, *changing]  # what is kept meanwhile, too
    destination.check_space(job.out, cast_size(both, dtype) if dtype else sum(info.size for info in both))

    def on_start(tokens: int) -> None:  # a text may have fewer than were asked for
        cost = Cost.of(shape, job.plan.wiring, job.plan.tp_shards, tokens, asked.matrices)
        if asked.spill:
            destination.check_spill(asked.spill, cost.activations)
        on_cost(cost)

    return refit(config, job.checkpoint.folder, job.files, dtype, asked, work, on_layer, on_start)


def _record(refitted: Outcome, job: Job, config: dict[str, Any], revision: str | None) -> None:
    """Write into the config what was fitted; of gains that are fitted anew, what they were fitted on is forgotten."""
    earlier = config.pop("calibrated", None) if refitted.request.gains else None
    made_from = earlier["base"] if earlier else provenance.record(job.source, job.checkpoint.folder, revision)
    kind = "refit" if refitted.request.matrices else "calibrated"
    config[kind] = refitted.record(made_from, job.plan.wiring.to_json())


def _notes_on_weights(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], is_gguf: bool) -> list[str]:
    notes = []
    if is_gguf:
        notes.append(
            "The weights come from a GGUF file: they had been quantised, and were dequantised for this checkpoint."
        )
    if unread := checkpoint.unexpected(tensors):
        notes.append(
            f"{len(unread)} tensors of the source are read by no Llama of its config, and came along: {unread[0]}, ..."
        )
    return notes


def _notes_on_fits(config: Mapping[str, Any]) -> list[str]:
    """What every fit of these weights found, and whether that is still so."""
    notes = list[str]()
    fits = [config[kind] for kind in ("calibrated", "refit") if kind in config]
    for fit in fits:
        notes += fit["notes"]
        if fit is not fits[-1] or fit["wiring"] != config["wiring"]:
            notes.append("More was changed after that KL was measured: `evaluate` tells what it is now.")
    return notes


def _checked_tensors(checkpoint: Checkpoint, plan: Plan) -> dict[str, TensorInfo]:
    """The checkpoint's tensors. Raises ValueError if they are not whole, or hold gains that the new wiring changes."""
    tensors = checkpoint.tensors()
    check_gains(checkpoint, checkpoint.gains(tensors), plan.wiring, plan.tp_shards)
    return tensors
