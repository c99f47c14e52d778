"""Weights of one layer at a time, and layers built of them: the source's, and those that are refitted already."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rewired.cache import discard
from rewired.checkpoint.tensors import save_tensors
from rewired.families import classes
from rewired.model.configuration import RewiredConfig
from rewired.model.family import Family
from rewired.model.residual_stream import PeekGain
from rewired.model.rewired_layer import RewiredLayer, Wirings

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
class Layers:
    """Layers of a model of this `config`; fitted tensors are stored in `dtype`, or in the source's where it is None."""

    config: RewiredConfig
    weights: Weights
    dtype: torch.dtype | None

    def build(self, index: int, wirings: Wirings, tensors: dict[str, torch.Tensor]) -> RewiredLayer:
        """Layer `index` with `tensors`, under their names in it, for its parameters."""
        with torch.device("meta"):
            layer: RewiredLayer = classes(self.config.family, "DecoderLayer")(self.config, index, wirings)
        wanted = layer.state_dict().keys()
        tensors = {name: tensor for name, tensor in (self._gains(layer) | tensors).items() if name in wanted}
        layer.load_state_dict(tensors, assign=True)
        return layer.requires_grad_(False).eval()

    def round(self, index: int, layer: RewiredLayer) -> None:
        """Round the parameters of `layer` to the dtypes that they are stored in."""
        for name, parameter in layer.named_parameters():
            parameter.copy_(parameter.to(self._stored(index, name)))

    def changed(self, index: int, layer: RewiredLayer, source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of `layer` that differ from the source's, in the dtypes that they are stored in."""
        before = self._gains(layer) | source
        return {
            name: tensor.to(self._stored(index, name))
            for name, tensor in layer.state_dict().items()
            if not torch.equal(tensor, before[name])
        }

    def _gains(self, layer: RewiredLayer) -> dict[str, torch.Tensor]:
        """The gains that a model begins with, where the source has none."""
        shape, device = (self.config.tp_shards, self.config.hidden_size), self.weights.device
        gains = [name for name, part in layer.named_modules() if isinstance(part, PeekGain)]
        return {f"{name}.weight": torch.ones(shape, device=device) for name in gains}

    def _stored(self, index: int, name: str) -> torch.dtype:
        """The dtype that a tensor of layer `index` is stored in; of a new gain that of the layer's matrices."""
        mlp = self.config.family.modules[-1]
        names = (name, f"{mlp.path}.{mlp.writer.name}.weight")
        return self.dtype or next(dtype for name in names if (dtype := self.weights.dtype(index, name)))


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
