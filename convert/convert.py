"""The conversion: a checkpoint in, a rewired checkpoint out. The weights stay as they are; the wiring is metadata."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rewired
from rewired.sources import Source, find_source
from rewired.sources.hub import COMPANION_FILES
from rewired.wiring import Region, parse_wiring, resolve, wiring_to_json

from . import cast, destination
from .card import model_card
from .checkpoint import INDEX, Checkpoint, gain_names, inside, read_json
from .llama import DENSE, REWIRED
from .plan import LayerTable, rewire
from .safetensors_header import TensorInfo, data_size

# what a checkpoint carries of us, so that `trust_remote_code=True` loads it where rewired is not installed
MODEL_CODE = (
    "collectives.py",
    "configuration_rewired_llama.py",
    "graph_collectives.py",
    "layer_ranges.py",
    "modeling_rewired_llama.py",
    "residual_stream.py",
    "sharding.py",
    "tensor_parallel.py",
    "wiring.py",
)
_AUTO_MAP = {
    "AutoConfig": "configuration_rewired_llama.RewiredLlamaConfig",
    "AutoModel": "modeling_rewired_llama.RewiredLlamaModel",
    "AutoModelForCausalLM": "modeling_rewired_llama.RewiredLlamaForCausalLM",
}


@dataclass(frozen=True)
class Request:
    """What to make of a checkpoint: wiring entries in their JSON form, and how to write the result."""

    wiring: Sequence[Mapping[str, Any]] = ()
    tp_shards: int | None = None
    to_llama: bool = False
    dtype: str | None = None
    copy: bool = False
    command: str = "rewired.convert.convert(...)"  # what the model card names as the command that made it


@dataclass(frozen=True)
class Plan:
    """The new wiring, and what a reader should know about it."""

    regions: list[Region]
    tp_shards: int
    table: LayerTable
    notes: list[str]


@dataclass(frozen=True)
class Conversion:
    """What was done or, in a dry run, what would be."""

    out: Path
    plan: Plan


def convert(
    source: str | Path,
    out: str | Path | None = None,
    request: Request = Request(),
    *,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Conversion:
    """Write `source`, rewired as `request` says, to the folder `out`; weights are linked where they can be.

    `on_bytes` hears how many bytes of weights were copied. Raises ValueError with one sentence when the source, the
    request or the destination is unfit; then nothing is written.
    """
    if request.dtype is not None:
        cast.parse_dtype(request.dtype)
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
        _write(found, checkpoint, tensors, plan, request, target, staging, on_bytes)
        shutil.rmtree(made, ignore_errors=True)
        destination.check_free(target, found.folder, force)  # copying took time: something may have come there
    return Conversion(target, plan)


def make_plan(checkpoint: Checkpoint, request: Request) -> Plan:
    """The wiring that `request` makes of `checkpoint`. Raises ValueError when it does not fit the model."""
    shape = checkpoint.shape
    if not (request.wiring or request.to_llama or checkpoint.is_rewired):
        raise ValueError("Nothing to rewire: say which layers, for example --ladder-layers 16-32.")
    regions = rewire(checkpoint.regions, request.wiring, shape.num_hidden_layers)
    regions = parse_wiring(wiring_to_json(regions), shape.num_hidden_layers)  # what is written must be readable
    if request.to_llama and not all(region.is_dense for region in regions):
        raise ValueError("--to-llama writes a dense Llama, and some layers are rewired: add --standard-layers 0-.")
    tp_shards = next(r for r in (request.tp_shards, checkpoint.tp_shards, shape.default_shards()) if r is not None)
    shape.check_shards(tp_shards)
    table = LayerTable.of(regions, shape, tp_shards, request.dtype or checkpoint.dtype)
    return Plan(regions, tp_shards, table, _notes(checkpoint, request, regions, tp_shards))


def _notes(checkpoint: Checkpoint, request: Request, regions: list[Region], tp_shards: int) -> list[str]:
    shape = checkpoint.shape
    heads, kv_heads, width = shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size
    if request.tp_shards:
        why = "as you asked"
    elif checkpoint.tp_shards:
        why = "as the source has it"
    else:
        why = f"the largest number up to 8 that divides {heads} heads, {kv_heads} KV heads and MLP width {width}"
    modules = resolve(regions, shape.num_hidden_layers, shape.hidden_size)
    if any(module.depends_on_shards for module in modules):
        meaning = (
            "this wiring's function depends on it: the model computes the same on any number of GPUs that divides it"
        )
    else:
        meaning = "this wiring computes the same function at any number"
    return [f"tp_shards {tp_shards} ({why}); {meaning}."]


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


def default_name(source: Source, checkpoint: Checkpoint, request: Request) -> str:
    """A name that says what was done: `llama-3.1-8b-ladder-16-32`."""
    regions = rewire([], request.wiring, checkpoint.shape.num_hidden_layers)
    named = [region for region in regions if not region.is_dense]
    parts = [_slug(region) for region in named]
    if not parts:
        parts = ["llama" if request.to_llama else "standard" if request.wiring else "rewired"]
    return "-".join([source.name, *parts])


def _slug(region: Region) -> str:
    """A region in a file name: `ladder-peek-16-32`, `desync-4x-8-16`, `partial-0.5-0-4_8-12`."""
    words = f"{region.describe()} {region.layers}".replace(" + ", "-").replace(" - ", "-no-")
    return re.sub(r"[^\w.-]+", "-", words.replace(",", "_")).strip("-")


def _write(
    source: Source,
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorInfo],
    plan: Plan,
    request: Request,
    out: Path,
    staging: Path,
    on_bytes: Callable[[int], None],
) -> None:
    """Everything that belongs into the output folder."""
    files = checkpoint.weight_files()
    is_cast = request.dtype is not None and cast.needs_cast(tensors.values(), request.dtype)
    if request.dtype is not None and is_cast:
        destination.check_space(out, cast.cast_size(tensors.values(), request.dtype))
        cast.cast(files, staging, request.dtype, on_bytes)
    else:
        copy = request.copy or not destination.can_link(files[0], staging)
        destination.check_space(out, sum(file.stat().st_size for file in files) if copy else 0)
        destination.place(files, staging, copy, on_bytes)
    for path in _companions(checkpoint.folder):
        (staging / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(inside(checkpoint.folder, path), staging / path)
    if (checkpoint.folder / INDEX).is_file():
        _write_index(checkpoint, staging, is_cast)
    (staging / "config.json").write_text(_json(_new_config(checkpoint, plan, request)), encoding="utf-8")
    (staging / "README.md").write_text(
        model_card(
            out.name,
            source.base_model,
            checkpoint.folder,
            plan.table,
            plan.notes,
            request.command,
            is_stock=request.to_llama,
        ),
        encoding="utf-8",
    )
    if not request.to_llama:
        code = Path(rewired.__file__).parent
        for name in MODEL_CODE:
            shutil.copyfile(code / name, staging / name)


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


def _companions(folder: Path) -> list[str]:
    """Tokenizer, chat template, generation config, licence: the small files that go along."""
    found = {
        str(path.relative_to(folder)) for pattern in COMPANION_FILES for path in folder.glob(pattern) if path.is_file()
    }
    return sorted(found)


def _write_index(checkpoint: Checkpoint, staging: Path, is_cast: bool) -> None:
    """The source's index; a cast changes the size it tells."""
    if not is_cast:
        shutil.copyfile(inside(checkpoint.folder, INDEX), staging / INDEX)
        return
    index = read_json(checkpoint.folder / INDEX)
    total = sum(data_size(staging / name) for name in set(index["weight_map"].values()))
    index["metadata"] = {**index.get("metadata", {}), "total_size": total}
    (staging / INDEX).write_text(_json(index), encoding="utf-8")


def _new_config(checkpoint: Checkpoint, plan: Plan, request: Request) -> dict[str, Any]:
    ours = ("auto_map", "wiring", "tp_shards", "ladder_layers")
    config = {name: value for name, value in checkpoint.config.items() if name not in ours}
    if request.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = request.dtype
    if request.to_llama:
        return config | {"model_type": DENSE, "architectures": ["LlamaForCausalLM"]}
    return config | {
        "model_type": REWIRED,
        "architectures": ["RewiredLlamaForCausalLM"],
        "auto_map": _AUTO_MAP,
        "tp_shards": plan.tp_shards,
        "wiring": wiring_to_json(plan.regions),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
