"""Tensors in safetensors files: one of them read, many of them written, whole checkpoints made of others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .checkpoint import INDEX, Checkpoint, read_json
from .safetensors_header import read_header

OnBytes = Callable[[int, int], None]  # hears how many bytes more are written, and of how many


def read_tensor(path: Path, name: str) -> Any:
    """One tensor of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def check_weights(checkpoint: Checkpoint) -> None:
    """Read all weights. Raises ValueError where they are not whole, and where one is no finite number."""
    for name, info in checkpoint.tensors(may_be_quantised=True).items():
        check_finite(name, read_tensor(checkpoint.folder / info.file, name))


def check_finite(name: str, tensor: Any) -> None:
    """Raise ValueError where one of the tensor's weights is no finite number."""
    if tensor.is_floating_point() and tensor.itemsize > 1 and not bool(tensor.isfinite().all()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"Tensor '{name}' holds no finite numbers in {dtype}: are the checkpoint's weights whole?")


def save_tensors(tensors: dict[str, Any], path: Path, metadata: dict[str, str] | None) -> None:
    """Write a safetensors file to `path`. Raises OSError where it cannot be written."""
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # a full disk, for example
        raise OSError(f"{path} cannot be written ({error}).") from None


def save_like(source: Path, tensors: dict[str, Any], folder: Path) -> None:
    """Write `tensors` into `folder` as the file `source` is: its name, its metadata and its mode."""
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
    save_tensors(tensors, folder / source.name, metadata)
    (folder / source.name).chmod(source.stat().st_mode)


def write_index(folder: Path, source: Path) -> None:
    """Write the index of all safetensors files in `folder`, with the metadata of that in `source` if it has one.

    A number of parameters that is no longer theirs is left out.
    """
    metadata = read_json(source / INDEX).get("metadata") if (source / INDEX).is_file() else None
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    tensors = {name: info for file in sorted(folder.glob("*.safetensors")) for name, info in read_header(file).items()}
    if metadata.get("total_parameters") != sum(math.prod(info.shape) for info in tensors.values()):
        metadata.pop("total_parameters", None)
    index = {
        "metadata": {**metadata, "total_size": sum(info.size for info in tensors.values())},
        "weight_map": {name: info.file for name, info in tensors.items()},
    }
    # in transformers' order
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def rewrite(
    source: Checkpoint,
    folder: Path,
    config: Mapping[str, Any],
    tensors_of: Callable[[Path], dict[str, Any]],
    on_bytes: OnBytes,
) -> Checkpoint:
    """Write the tensors that `tensors_of` makes of each file of `source`, and `config`, into the empty `folder`.

    One file is in memory at a time.
    """
    total = sum(path.stat().st_size for path in source.weight_files())
    for path in source.weight_files():
        save_like(path, tensors_of(path), folder)
        on_bytes(path.stat().st_size, total)
    if (source.folder / INDEX).is_file():
        write_index(folder, source.folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return Checkpoint.open(folder)
