"""The conversion, step by step: a checkpoint in, a rewired checkpoint out.

The wiring is metadata. Unless weights are cast or refitted, no tensor is read.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.foreign_code import without_foreign_code
from rewired.checkpoint.kv_heads import copies_in
from rewired.checkpoint.provenance import AGAIN, FITS
from rewired.checkpoint.rewired_config import stock_config, wired_config
from rewired.checkpoint.safetensors_header import TensorInfo
from rewired.checkpoint.tensors import OnBytes
from rewired.refit.cost import Cost
from rewired.rotate.request import RECORD
from rewired.sources import Source, find_source
from rewired.text.tokenizer import check_needs_no_code

from . import destination
from .changed_weights import check_basis, check_gains
from .job import Job
from .kv_heads import merge_kv_heads, repeat_kv_heads
from .plan import Plan, make_plan
from .refit import OnLayer, check_text, fit, notes_on_fits, record
from .request import Request, default_name
from .rotation import notes_on_rotation, rotate, text_of
from .write import write

if TYPE_CHECKING:
    from rewired.refit.run import RefitResult

_NOTE_ON_GGUF = "The weights come from a GGUF file: they had been quantised, and were dequantised for this checkpoint."


@dataclass(frozen=True)
class Conversion:
    """What was done or, in a dry run, what would be."""

    out: Path
    plan: Plan
    refit: RefitResult | None = None


def convert(
    source: str | Path,
    out: str | Path | None = None,
    request: Request | None = None,
    *,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    on_bytes: OnBytes = lambda count, total: None,
    on_layer: OnLayer = lambda layer, layers, fits: None,
    on_cost: Callable[[Cost], None] = lambda cost: None,
) -> Conversion:
    """Write `source`, rewired as `request` says, to the folder `out`; weights are linked where they can be.

    `on_bytes` hears how many bytes more of weights are written, and of how many in all; `on_cost` what a refit that
    begins will take; and `on_layer` of each layer that it has done: its number, how many there are, and a
    `rewired.refit.fitting.Fit` for each of its modules that were fitted. What a refit had finished when it was
    interrupted is kept beside `out`, and the same call goes on with it. Raises ValueError with one sentence when the
    source, the request or the destination is unfit; then nothing is written.
    """
    request = request or Request()
    origin = find_source(str(source), revision)
    if out and not dry_run:
        destination.check_free(Path(out), origin.folder, force)  # a source's config may have to be fetched
    target, plan = _plan(origin, out, request, dry_run, force)
    if dry_run:
        taken = destination.note_on_taken(target, origin.folder, force)
        notes = [*plan.notes, *plan.by_ranks, *notes_on_rotation(plan.rotation), *taken]
        return Conversion(target, replace(plan, notes=notes))
    with destination.staged_folder(target) as staging:
        checkpoint, merged = Checkpoint.open(origin.fetch(request.dtype)), list[str]()
        tensors = _checked_tensors(checkpoint, plan, request.retrain)
        job = Job(origin, checkpoint, checkpoint, tensors, plan, request, target, staging, on_bytes)
        if plan.kv_copies > 1:
            job = repeat_kv_heads(job)
        elif request.to_stock and copies_in(job.weights) > 1:
            job, merged = merge_kv_heads(job)
        if plan.rotation:
            job = rotate(job)
        config, outcome, work = _config(job), None, target.with_name(f".{target.name}.refit")
        if plan.cost:
            outcome = fit(job, config, work, on_layer, on_cost)
            config = record(outcome, job, config, revision)
        notes = [
            *plan.notes,
            *merged,
            *([_NOTE_ON_GGUF] if origin.is_gguf else []),
            *notes_on_rotation(config.get(RECORD)),
            *notes_on_fits(config),
        ]
        notes = write(job, config, notes, outcome.files if outcome else {})
        shutil.rmtree(job.scratch, ignore_errors=True)
        destination.check_free(target, origin.folder, force)  # it took time: something may have come there
    if outcome:
        shutil.rmtree(work)
        notes += outcome.time()  # on no card: the same call gives the same folder
    return Conversion(target, replace(plan, notes=notes), outcome)


def _plan(origin: Source, out: str | Path | None, request: Request, dry_run: bool, force: bool) -> tuple[Path, Plan]:
    """The folder to write and the plan, all checked that can be before anything large is downloaded or written."""
    with tempfile.TemporaryDirectory(prefix="rewired-") as scratch:
        preview = Checkpoint.open(origin.preview(Path(scratch)))
        plan = make_plan(preview, request)
        target = Path(out) if out else Path(default_name(origin.name, preview, request))
        if not dry_run:
            destination.check_free(target, origin.folder, force)
        checks_weights = dry_run and origin.folder is not None
        for fit_request in (request.refit if plan.cost else None, text_of(request)):
            if fit_request:
                check_text(fit_request, preview if checks_weights else None)
        if checks_weights:
            _checked_tensors(preview, plan, request.retrain)
    return target, plan


def _checked_tensors(checkpoint: Checkpoint, plan: Plan, retrain: bool) -> dict[str, TensorInfo]:
    """The checkpoint's tensors.

    Raises ValueError if they are not whole, or hold gains that the new wiring or a rotation changes, and for a
    tokenizer that takes code of its own.
    """
    check_needs_no_code(checkpoint.folder)
    tensors = checkpoint.tensors(may_be_quantised=True)
    gains = checkpoint.gains(tensors)
    if not retrain:
        check_gains(checkpoint, gains, plan.wiring, plan.tp_shards)
    if plan.rotation:
        check_basis(checkpoint, gains)
    return tensors


def _config(job: Job) -> dict[str, Any]:
    """The source's config with the plan's wiring."""
    config, dtype = without_foreign_code(json.dumps(job.weights.config))[0], job.request.dtype
    if dtype is not None:
        config = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": dtype}
    if job.plan.rewired_again:
        made = {name: value for name, value in config.items() if not (job.request.retrain and name in FITS)}
        config = made | {AGAIN: job.plan.rewired_again}
    if job.request.to_stock:
        return stock_config(config)
    return wired_config(config, job.plan.wiring.to_json(), job.plan.tp_shards)
