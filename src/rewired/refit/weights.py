"""Weights of one layer at a time: the source's, and those of the layers that are refitted already."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rewired.checkpoint.tensors import save_tensors
from rewired.model.family import Family

from .fitting import Fit


@dataclass(frozen=True)
class Weights:
    """Tensors in safetensors files; computed with in float32."""

    files: Mapping[str, Path]  # of every tensor
    device: torch.device
    family: Family

    def tensor(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name).to(self.device, torch.float32)

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of layer `index`, under their names in it."""
        prefix = f"{self.family.layer(index)}."
        return {name.removeprefix(prefix): self.tensor(name) for name in self.files if name.startswith(prefix)}

    def dtype(self, index: int, name: str) -> torch.dtype | None:
        """What tensor `name` of layer `index` is stored in; None if it is not there."""
        name = f"{self.family.layer(index)}.{name}"
        if name not in self.files:
            return None
        with safe_open(self.files[name], framework="pt") as file:
            dtype: torch.dtype = file.get_slice(name)[:1].dtype
            return dtype


@dataclass(frozen=True)
class FinishedLayer:
    """`tensors` are those that changed, under their names in the layer."""

    tensors: dict[str, torch.Tensor]
    fits: list[Fit]


class Finished:
    """The layers that a refit has finished, each in a file of its own, so that an interrupted one goes on.

    They are good for one conversion only, which `settings` describes: what another one left there is removed.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], family: Family) -> None:
        self.folder, self.family = folder, family
        self.settings = json.dumps(settings, sort_keys=True)
        known = folder / "settings.json"
        if folder.is_symlink() or not known.is_file() or known.read_bytes() != self.settings.encode():
            discard(folder)

    def read(self, index: int) -> FinishedLayer | None:
        """None where it is not there, or broken after a power cut."""
        prefix = f"{self.family.layer(index)}."
        try:
            with safe_open(self._path(index), framework="pt") as file:
                fits = json.loads((file.metadata() or {})["fits"])
                tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (FileNotFoundError, KeyError, SafetensorError):
            return None
        return FinishedLayer(tensors, [Fit.from_json(fit) for fit in fits])

    def write(self, index: int, tensors: Mapping[str, torch.Tensor], fits: Sequence[Fit]) -> None:
        """Store `tensors` under their names in the whole model. The file is complete, or not there at all."""
        if not self.folder.is_dir():
            self.folder.mkdir()
            (self.folder / "settings.json").write_bytes(self.settings.encode())
        scratch = self.folder / "writing"
        on_cpu = {f"{self.family.layer(index)}.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_tensors(on_cpu, scratch, {"fits": json.dumps([asdict(fit) for fit in fits])})
        scratch.replace(self._path(index))

    def has_begun(self) -> bool:
        return any(self.folder.glob("layer-*.safetensors"))

    def files(self) -> dict[str, Path]:
        """The file of every tensor, when all layers are written."""
        files: dict[str, Path] = {}
        for path in sorted(self.folder.glob("layer-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        return files

    def _path(self, index: int) -> Path:
        return self.folder / f"layer-{index:05d}.safetensors"


def discard(folder: Path) -> None:
    """Remove what a refit left there."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
