"""What a conversion writes: weights, index, config, model card, and the model's own code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewired.checkpoint.checkpoint import INDEX, SINGLE, Checkpoint, inside, read_json
from rewired.checkpoint.dtypes import cast_size, needs_cast
from rewired.checkpoint.rewired_llama import stock_config, wired_config, write_code
from rewired.checkpoint.safetensors_header import TensorInfo, data_size, read_header
from rewired.model.regions import parse_regions
from rewired.sources import Source
from rewired.sources.hub import COMPANION_FILES

from . import destination
from .card import model_card
from .request import Plan, Request
from .rewrite import gather, rewrite

# a single file cannot have an index beside it: transformers would not look at the index
_SINGLE_OF_SEVERAL, _NEW = "model-00001-of-00002.safetensors", "model-gains.safetensors"


@dataclass(frozen=True)
class Job:
    """What a conversion works on, and what it is to make of it."""

    source: Source
    checkpoint: Checkpoint
    tensors: Mapping[str, TensorInfo]
    plan: Plan
    request: Request
    out: Path

    @property
    def files(self) -> dict[str, Path]:
        """The file of every tensor."""
        return {name: self.checkpoint.folder / info.file for name, info in self.tensors.items()}


def write(
    job: Job,
    config: Mapping[str, Any],
    fitted: Mapping[str, Path],
    staging: Path,
    on_bytes: Callable[[int], None],
) -> None:
    """Everything that belongs into the output folder; tensors that were `fitted` come from the files named there."""
    _write_weights(job, fitted, staging, on_bytes)
    folder = job.checkpoint.folder
    for path in _companions(folder):
        (staging / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(inside(folder, path), staging / path)
    (staging / "config.json").write_text(_json(config), encoding="utf-8")
    card = model_card(
        job.out.name,
        job.source.base_model,
        folder,
        job.plan.table,
        job.plan.notes,
        job.request.command,
        is_stock=job.request.to_llama,
        refitted=_refitted(config),
    )
    (staging / "README.md").write_text(card, encoding="utf-8")
    if not job.request.to_llama:
        write_code(staging)


def _refitted(config: Mapping[str, Any]) -> str:
    """The layers whose weights were fitted to what they read."""
    entries = config.get("refit", {}).get("wiring", [])
    regions = parse_regions(entries, config["num_hidden_layers"])
    return ", ".join(region.layers for region in regions if not region.is_dense)


def _write_weights(job: Job, fitted: Mapping[str, Path], staging: Path, on_bytes: Callable[[int], None]) -> None:
    """Files in which no tensor changes are linked, where that can be; the others are written anew."""
    files, tensors, dtype = job.checkpoint.weight_files(), job.tensors, job.request.dtype
    if dtype is not None and not needs_cast(tensors.values(), dtype):
        dtype = None
    holding_fitted = {tensors[name].file for name in fitted if name in tensors}
    changed = [file for file in files if dtype or file.name in holding_fitted]
    kept = [file for file in files if file not in changed]
    copy = job.request.copy or not destination.can_link(files[0], staging)
    sizes = [file.stat().st_size for file in (files if copy else changed)]
    destination.check_space(job.out, cast_size(tensors.values(), dtype) if dtype else sum(sizes))
    if changed:
        rewrite(changed, staging, dtype, fitted, on_bytes)
    destination.place(kept, staging, copy, on_bytes)
    new = {name: path for name, path in fitted.items() if name not in tensors}
    if new:
        gather(new, _free(staging / _NEW))
        if (staging / SINGLE).exists():
            (staging / SINGLE).rename(staging / _SINGLE_OF_SEVERAL)
    if new or (job.checkpoint.folder / INDEX).is_file():
        _write_index(job.checkpoint, staging, is_same=not (new or dtype))


def _free(path: Path) -> Path:
    """`path`, or one like it that is not there yet: an earlier calibration may have left its gains."""
    return path if not path.exists() else _free(path.with_stem(f"{path.stem}-more"))


def _companions(folder: Path) -> list[str]:
    """Tokenizer, chat template, generation config, licence: the small files that go along."""
    found = {
        str(path.relative_to(folder)) for pattern in COMPANION_FILES for path in folder.glob(pattern) if path.is_file()
    }
    return sorted(found)


def _write_index(checkpoint: Checkpoint, staging: Path, is_same: bool) -> None:
    """The source's index, or one of what is in `staging`."""
    if is_same:
        shutil.copyfile(inside(checkpoint.folder, INDEX), staging / INDEX)
        return
    old = read_json(checkpoint.folder / INDEX) if (checkpoint.folder / INDEX).is_file() else {}
    files = sorted(staging.glob("*.safetensors"))
    index = {
        "metadata": {**old.get("metadata", {}), "total_size": sum(map(data_size, files))},
        "weight_map": {name: file.name for file in files for name in read_header(file)},
    }
    (staging / INDEX).write_text(_json(index), encoding="utf-8")


def new_config(job: Job) -> dict[str, Any]:
    """The source's config with the plan's wiring."""
    config = job.checkpoint.config
    if job.request.dtype is not None:
        config = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": job.request.dtype}
    if job.request.to_llama:
        return stock_config(config)
    return wired_config(config, job.plan.wiring.to_json(), job.plan.tp_shards)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
