"""The content of the output folder: weights, linked where nothing changes in them; config, card, companions, code."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rewired.checkpoint.checkpoint import INDEX, SINGLE, inside
from rewired.checkpoint.foreign_code import copy_without_foreign_code, without_foreign_code
from rewired.checkpoint.rewired_config import write_code
from rewired.checkpoint.safetensors_header import cast_size, needs_cast, read_header
from rewired.checkpoint.tensors import check_finite, read_tensor, save_like, save_tensors, write_index
from rewired.sources.hub import COMPANION_FILES

from .card import model_card
from .destination import check_space
from .job import Job

# a single file cannot have an index beside it: transformers would not look at the index
_SINGLE_OF_SEVERAL, _NEW = "model-00001-of-00002.safetensors", "model-gains.safetensors"


def write(job: Job, config: Mapping[str, Any], notes: list[str], fitted: Mapping[str, Path]) -> list[str]:
    """Write all that belongs into the output; tensors that were `fitted` come from the files named there.

    Returns the notes of the model card: `notes`, and one on code that did not come along.
    """
    _write_weights(job, fitted)
    folder, staging = job.checkpoint.folder, job.staging
    _, of_config = without_foreign_code((folder / "config.json").read_text(encoding="utf-8"))
    foreign = {"config.json": of_config, **_copy_companions(folder, staging)}
    if entries := [f"{entry} of {file}" for file, found in foreign.items() for entry in found]:
        code = "The source's own code does not come along, and what points to it was dropped"
        notes = [*notes, f"{code}: {'; '.join(entries)}."]
    (staging / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (staging / "README.md").write_text(model_card(job, config, notes), encoding="utf-8")
    if not job.request.to_stock:
        write_code(job.checkpoint.shape.family, staging)
    return notes


def _copy_companions(source: Path, target: Path) -> dict[str, list[str]]:
    """Copy the small files that go along, such as tokenizer and licence; returns what pointed to code in each."""
    paths = {path for pattern in COMPANION_FILES for path in source.glob(pattern) if path.is_file()}
    foreign = dict[str, list[str]]()
    for name in sorted(str(path.relative_to(source)) for path in paths):
        (target / name).parent.mkdir(exist_ok=True)
        foreign[name] = copy_without_foreign_code(inside(source, name), target / name)
    return foreign


def _write_weights(job: Job, fitted: Mapping[str, Path]) -> None:
    """Files in which no tensor changes are linked, where that can be; others are written anew without lost gains."""
    staging = job.staging
    files, tensors, dtype, lost = job.weights.weight_files(), job.tensors, job.request.dtype, job.lost_gains
    if dtype is not None and not needs_cast(tensors.values(), dtype):
        dtype = None
    changing = {tensors[name].file for name in (*fitted, *lost) if name in tensors}
    changed = [file for file in files if dtype or file.name in changing]
    unchanged = [file for file in files if file not in changed]
    copy = job.request.copy or not _can_link(files[0], staging)
    sizes = [file.stat().st_size for file in (files if copy else changed)]
    check_space(job.out, cast_size(tensors.values(), dtype) if dtype else sum(sizes))

    def on_part(count: int) -> None:
        job.on_bytes(count, sum(sizes))

    if changed:
        _rewrite(changed, staging, dtype, fitted, lost, on_part)
    _place(unchanged, staging, copy, on_part)
    new = {name: path for name, path in fitted.items() if name not in tensors}
    if new:
        gathered = {name: read_tensor(path, name) for name, path in new.items()}
        save_tensors(gathered, _free(staging / _NEW), {"format": "pt"})
        if (staging / SINGLE).exists():
            (staging / SINGLE).rename(staging / _SINGLE_OF_SEVERAL)
    if new or (job.weights.folder / INDEX).is_file():
        write_index(staging, job.weights.folder)


def _can_link(source: Path, folder: Path) -> bool:
    probe = folder / ".probe"
    try:
        os.link(source.resolve(), probe)
    except OSError:  # another filesystem, or one without hard links
        return False
    probe.unlink()
    return True


def _place(files: Iterable[Path], folder: Path, copy: bool, on_bytes: Callable[[int], None]) -> None:
    """Hard-link or copy weight files into `folder`; `on_bytes` hears of every file copied."""
    for file in files:
        source, target = file.resolve(), folder / file.name
        if copy:
            shutil.copyfile(source, target)
            on_bytes(source.stat().st_size)
        else:
            os.link(source, target)


def _free(path: Path) -> Path:
    """`path`, or one like it that is not there yet: an earlier calibration may have left its gains."""
    return path if not path.exists() else _free(path.with_stem(f"{path.stem}-more"))


def _rewrite(
    files: Iterable[Path],
    folder: Path,
    dtype: str | None,
    replaced: Mapping[str, Path],
    lost: Collection[str],
    on_bytes: Callable[[int], None],
) -> None:
    """Write each of `files` into `folder` without what is `lost`, floating-point tensors as `dtype`, if there is one.

    Tensors that are `replaced` come from the files named there. One file is in memory at a time.
    """
    import torch

    target = getattr(torch, dtype) if dtype else None
    for path in files:
        tensors: dict[str, Any] = {}
        for name in read_header(path):
            if name not in lost:
                tensor = read_tensor(replaced.get(name, path), name)
                is_plain = tensor.is_floating_point() and tensor.itemsize > 1  # smaller ones are quantised
                tensors[name] = tensor.to(target) if target and is_plain else tensor
                check_finite(name, tensors[name])
        if tensors:
            save_like(path, tensors, folder)
        on_bytes(path.stat().st_size)
