"""Weight files in another floating-point type: the one thing in a conversion that reads tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .safetensors_header import TensorInfo

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_dtype(name: str) -> str:
    """The full name of a dtype. Raises ValueError for another one."""
    name = ALIASES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"'{name}' is no dtype to convert to: choose one of {', '.join(DTYPES)}.")
    return name


def needs_cast(tensors: Iterable[TensorInfo], dtype: str) -> bool:
    return any(info.dtype in DTYPES.values() and info.dtype != DTYPES[dtype] for info in tensors)


def cast_size(tensors: Iterable[TensorInfo], dtype: str) -> int:
    """Bytes of tensor data after the cast."""
    return sum(
        replace(info, dtype=DTYPES[dtype] if info.dtype in DTYPES.values() else info.dtype).size for info in tensors
    )


def cast(files: Iterable[Path], folder: Path, dtype: str, on_bytes: Callable[[int], None]) -> None:
    """Write each of `files` into `folder`, its floating-point tensors as `dtype`; one file in memory at a time."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    target = getattr(torch, dtype)
    for path in files:
        tensors: dict[str, Any] = {}
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is no dict
                tensor = file.get_tensor(name)
                tensors[name] = tensor.to(target) if tensor.is_floating_point() else tensor
        save_file(tensors, folder / path.name, metadata)
        (folder / path.name).chmod(path.stat().st_mode)
        on_bytes(path.stat().st_size)
