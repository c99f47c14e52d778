"""Layers of the models in a refit: built from a checkpoint's weights, and compared with them once they are fitted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rewired.families import classes
from rewired.model.configuration import RewiredConfig
from rewired.model.residual_stream import PeekGain
from rewired.model.rewired_layer import RewiredLayer, Wirings

from .weights import Weights


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
