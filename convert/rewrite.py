"""Weight files written anew: in another floating-point type, or with other tensors in some places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewired.checkpoint.safetensors_header import TensorInfo

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DOUBLE = "F64"
ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_dtype(name: str) -> str:
    """The full name of a dtype. Raises ValueError for another one."""
    name = ALIASES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"'{name}' is no dtype to convert to: choose one of {', '.join(DTYPES)}.")
    return name


def check_types(tensors: Iterable[TensorInfo], dtype: str | None) -> None:
    """Raise ValueError if one of `tensors`, cast to `dtype` if there is one, has a type that no fit is written in."""
    stored = {(_cast(info, dtype) if dtype else info).dtype for info in tensors}
    if odd := stored - set(DTYPES.values()):
        advice = "convert with --dtype bfloat16" if odd == {_DOUBLE} else "take weights that are not quantised"
        raise ValueError(f"Weights in {', '.join(sorted(odd))} cannot be fitted: {advice}.")


def needs_cast(tensors: Iterable[TensorInfo], dtype: str) -> bool:
    return any(_cast(info, dtype) != info for info in tensors)


def cast_size(tensors: Iterable[TensorInfo], dtype: str) -> int:
    """Bytes of tensor data after the cast."""
    return sum(_cast(info, dtype).size for info in tensors)


def _cast(info: TensorInfo, dtype: str) -> TensorInfo:
    return replace(info, dtype=DTYPES[dtype]) if info.dtype in {*DTYPES.values(), _DOUBLE} else info


def rewrite(
    files: Iterable[Path],
    folder: Path,
    dtype: str | None,
    replaced: Mapping[str, Path],
    on_bytes: Callable[[int], None],
) -> None:
    """Write each of `files` into `folder`, its floating-point tensors as `dtype`, if there is one.

    Tensors that are `replaced` come from the files named there. One file is in memory at a time.
    """
    import torch
    from safetensors import safe_open

    target = getattr(torch, dtype) if dtype else None
    for path in files:
        tensors: dict[str, Any] = {}
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is no dict
                tensor = read_tensor(replaced[name], name) if name in replaced else file.get_tensor(name)
                is_plain = tensor.is_floating_point() and tensor.itemsize > 1  # smaller ones are quantised
                tensors[name] = tensor.to(target) if target and is_plain else tensor
        save(tensors, folder / path.name, metadata)
        (folder / path.name).chmod(path.stat().st_mode)
        on_bytes(path.stat().st_size)


def gather(tensors: Mapping[str, Path], target: Path) -> None:
    """A new file of `tensors`, each from the file named for it."""
    save({name: read_tensor(path, name) for name, path in tensors.items()}, target, {"format": "pt"})


def save(tensors: dict[str, Any], path: Path, metadata: dict[str, str] | None) -> None:
    """A safetensors file at `path`. Raises OSError where it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # a full disk, for example
        raise OSError(f"{path} cannot be written ({error}).") from None


def read_tensor(path: Path, name: str) -> Any:
    """One tensor of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
