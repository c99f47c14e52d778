"""Weight files written anew: in another floating-point type, or with other tensors in some places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rewired.checkpoint.tensors import read_tensor, save_tensors


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
        save_tensors(tensors, folder / path.name, metadata)
        (folder / path.name).chmod(path.stat().st_mode)
        on_bytes(path.stat().st_size)


def gather(tensors: Mapping[str, Path], target: Path) -> None:
    """Write a new file of `tensors`, each read from the file named for it."""
    save_tensors({name: read_tensor(path, name) for name, path in tensors.items()}, target, {"format": "pt"})
