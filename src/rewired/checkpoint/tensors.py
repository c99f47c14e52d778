"""Tensors in safetensors files: one of them read, many of them written."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_tensor(path: Path, name: str) -> Any:
    """One tensor of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def save_tensors(tensors: dict[str, Any], path: Path, metadata: dict[str, str] | None) -> None:
    """Write a safetensors file to `path`. Raises OSError where it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # a full disk, for example
        raise OSError(f"{path} cannot be written ({error}).") from None
