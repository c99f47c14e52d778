"""The weight files of the output: linked where nothing changes in them, written anew where a tensor does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rewired.checkpoint.checkpoint import INDEX, SINGLE, Checkpoint, inside, read_json
from rewired.checkpoint.dtypes import cast_size, needs_cast
from rewired.checkpoint.tensors import check_finite, read_tensor, save_tensors, write_index

from .disk_space import check_space
from .job import Job, OnBytes

# a single file cannot have an index beside it: transformers would not look at the index
_SINGLE_OF_SEVERAL, _NEW = "model-00001-of-00002.safetensors", "model-gains.safetensors"
_CHUNK = 16 << 20  # bytes copied at a time


def write_weights(job: Job, fitted: Mapping[str, Path], staging: Path, on_bytes: OnBytes) -> None:
    """Fill `staging` with the weights of `job`; tensors that were `fitted` come from the files named there.

    Files in which no tensor changes are linked, where that can be; the others are written anew, without lost gains.
    """
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
        on_bytes(count, sum(sizes))

    if changed:
        _rewrite(changed, staging, dtype, fitted, lost, on_part)
    _place(unchanged, staging, copy, on_part)
    new = {name: path for name, path in fitted.items() if name not in tensors}
    if new:
        _gather(new, _free(staging / _NEW))
        if (staging / SINGLE).exists():
            (staging / SINGLE).rename(staging / _SINGLE_OF_SEVERAL)
    if new or (job.weights.folder / INDEX).is_file():
        _write_index(job.weights, staging, is_same=not (new or dtype or lost))


def _can_link(source: Path, folder: Path) -> bool:
    """Whether `source` can be hard-linked into `folder`."""
    probe = folder / ".probe"
    try:
        os.link(source.resolve(), probe)
    except OSError:  # another filesystem, or one without hard links
        return False
    probe.unlink()
    return True


def _place(files: Iterable[Path], folder: Path, copy: bool, on_bytes: Callable[[int], None]) -> None:
    """Hard-link or copy weight files into `folder`; `on_bytes` hears of every chunk copied."""
    for file in files:
        source, target = file.resolve(), folder / file.name
        if not copy:
            os.link(source, target)
            continue
        with source.open("rb") as reader, target.open("wb") as writer:
            while chunk := reader.read(_CHUNK):
                writer.write(chunk)
                on_bytes(len(chunk))


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
    """Write each of `files` into `folder` without what is `lost`, its floating-point tensors as `dtype`, if there is
    one.

    Tensors that are `replaced` come from the files named there. One file is in memory at a time.
    """
    import torch
    from safetensors import safe_open

    target = getattr(torch, dtype) if dtype else None
    for path in files:
        tensors: dict[str, Any] = {}
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for name in set(file.keys()).difference(lost):
                tensor = read_tensor(replaced[name], name) if name in replaced else file.get_tensor(name)
                is_plain = tensor.is_floating_point() and tensor.itemsize > 1  # smaller ones are quantised
                tensors[name] = tensor.to(target) if target and is_plain else tensor
                check_finite(name, tensors[name])
        if tensors:
            save_tensors(tensors, folder / path.name, metadata)
            (folder / path.name).chmod(path.stat().st_mode)
        on_bytes(path.stat().st_size)


def _gather(tensors: Mapping[str, Path], target: Path) -> None:
    """Write a new file of `tensors`, each read from the file named for it."""
    save_tensors({name: read_tensor(path, name) for name, path in tensors.items()}, target, {"format": "pt"})


def _write_index(checkpoint: Checkpoint, staging: Path, is_same: bool) -> None:
    """The source's index if nothing changed and transformers can read it, else a new one of the files in `staging`."""
    old = read_json(checkpoint.folder / INDEX) if (checkpoint.folder / INDEX).is_file() else {}
    metadata = old.get("metadata")
    if is_same and isinstance(metadata, dict):
        shutil.copyfile(inside(checkpoint.folder, INDEX), staging / INDEX)
    else:
        write_index(staging, metadata if isinstance(metadata, dict) else {})
