"""Tensors in safetensors files: one of them read, many of them written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import INDEX, Checkpoint
from .safetensors_header import data_size, read_header


def read_tensor(path: Path, name: str) -> Any:
    """One tensor of a safetensors file."""
    from safetensors import safe_open

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
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # a full disk, for example
        raise OSError(f"{path} cannot be written ({error}).") from None


def write_index(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write the index of all safetensors files in `folder`; its `metadata` with their size."""
    files = sorted(folder.glob("*.safetensors"))
    index = {
        "metadata": {**metadata, "total_size": sum(map(data_size, files))},
        "weight_map": {name: file.name for file in files for name in read_header(file)},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
