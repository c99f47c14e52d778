"""The conversion: a checkpoint in, a rewired checkpoint out. The weights stay as they are; the wiring is metadata."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewired.packages import sha256
from rewired.sources import Source, find_source
from rewired.wiring import Region, resolve

from . import destination
from .checkpoint import INDEX, Checkpoint, gain_names
from .request import Plan, Request, default_name, make_plan
from .rewrite import DTYPES, parse_dtype
from .safetensors_header import TensorInfo
from .write import new_config, write

if TYPE_CHECKING:
    from .refit import Outcome


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
) -> Conversion:
    """Write `source`, rewired as `request` says, to the folder `out`; weights are linked where they can be.

    `on_bytes` hears how many bytes of weights were copied, and `on_layer` of each layer that a refit has done: its
    number, how many there are, and a `rewired.convert.refit.Fit` for each of its modules that were fitted. What a refit
    had finished when it was interrupted is kept beside `out`, and the same call goes on with it. Raises ValueError with
    one sentence when the source, the request or the destination is unfit; then nothing is written.
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
        if dry_run:
            if found.folder:
                _checked_tensors(preview, plan)
            return Conversion(target, plan)
    with destination.staged_folder(target) as staging:
        made = staging / ".source"
        checkpoint = Checkpoint.open(found.fetch(made, request.dtype))
        tensors = _checked_tensors(checkpoint, plan)
        plan = replace(plan, notes=[*plan.notes, *_notes_on_weights(checkpoint, tensors, is_gguf=made.exists())])
        config = new_config(checkpoint, plan, request)
        work = target.with_name(f".{target.name}.refit")
        refitted = _refit(found, checkpoint, tensors, plan, request, config, work, on_layer)
        if refitted:
            plan = replace(plan, notes=[*plan.notes, *refitted.notes()])
            if refitted.matrices:
                config["refit"] = refitted.record(_base(found, checkpoint, revision))
        write(
            found,
            checkpoint,
            tensors,
            plan,
            request,
            config,
            refitted.files if refitted else {},
            target,
            staging,
            on_bytes,
        )
        shutil.rmtree(made, ignore_errors=True)
        destination.check_free(target, found.folder, force)  # it took time: something may have come there
    shutil.rmtree(work, ignore_errors=True)
    return Conversion(target, plan, refitted)


def _refit(
    source: Source,
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorInfo],
    plan: Plan,
    request: Request,
    config: Mapping[str, Any],
    work: Path,
    on_layer: Callable[[int, int, list[Any]], None],
) -> Outcome | None:
    """The tensors of the rewired layers, fitted anew; None where nothing is to be fitted."""
    if request.refit is None or plan.cost is None:
        return None
    from .refit import refit

    files = {name: checkpoint.folder / info.file for name, info in tensors.items()}
    return refit(config, checkpoint.folder, files, _stored_dtype(tensors, request), request.refit, work, on_layer)


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


def _checked_tensors(checkpoint: Checkpoint, plan: Plan) -> dict[str, TensorInfo]:
    """The checkpoint's tensors. Raises ValueError if they are not whole, or hold gains that the new wiring changes."""
    tensors = checkpoint.tensors()
    stored = set(checkpoint.gains(tensors))
    if stored and (
        plan.tp_shards != checkpoint.tp_shards
        or _gained(plan.regions, checkpoint) != _gained(checkpoint.regions, checkpoint)
    ):
        raise ValueError(
            f"{checkpoint.folder} holds gains (*_gain.weight) of its present wiring, and this would change it there: "
            "name other layers, or rewire the model that it was trained from."
        )
    return tensors


def _gained(regions: list[Region], checkpoint: Checkpoint) -> dict[str, Region]:
    """The wiring of each module that has a gain."""
    shape = checkpoint.shape
    modules = resolve(regions, shape.num_hidden_layers, shape.hidden_size)
    return dict(zip(gain_names(regions, shape), (m.region for m in modules if m.reads_shards), strict=True))


def _base(source: Source, checkpoint: Checkpoint, revision: str | None) -> dict[str, Any]:
    """What identifies the source: id or path, revision, and the SHA-256 of its index or, without one, its weights."""
    index = checkpoint.folder / INDEX
    is_snapshot = checkpoint.folder.parent.name == "snapshots"  # of the hub's cache, named by its commit
    return {
        "name": str(source.folder.resolve()) if source.folder else source.base_model,
        "revision": checkpoint.folder.name if is_snapshot else revision,
        "sha256": sha256(index if index.is_file() else checkpoint.weight_files()[0]),
    }


def _stored_dtype(tensors: Mapping[str, TensorInfo], request: Request) -> str:
    """What fitted weights are written as: what the layers' own are. Raises ValueError for another kind of number."""
    if request.dtype is not None:
        return request.dtype
    stored = next(info.dtype for name, info in tensors.items() if name.endswith("down_proj.weight"))
    names = {short: name for name, short in DTYPES.items()}
    if stored not in names:
        raise ValueError(f"Weights in {stored} cannot be refitted: convert with --dtype bfloat16.")
    return names[stored]
