"""A layer's attention or MLP as a refit needs it: split where the refit looks inside, and open to folding fits in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from rewired.model.family import Module
from rewired.model.residual_stream import ResidualStream
from rewired.model.rewired_layer import RewiredLayer
from rewired.model.sharding import OnShards, pack_shards, row_parallel
from rewired.model.wiring import ModuleWiring


class RefitModule:
    """The module `names` of a `layer`, which reads the stream and writes to it. All shards are in this process."""

    def __init__(self, layer: RewiredLayer, names: Module, wiring: ModuleWiring) -> None:
        self.names, self.wiring = names, wiring
        self.is_mlp = not names.is_attention
        self.shards = layer.shards
        self.gain: Any = getattr(layer, names.gain)
        self.norm: Any = layer.get_submodule(names.norm)
        self.stock: Any = layer.get_submodule(names.path)
        self.inputs: list[nn.Linear] = [getattr(self.stock, linear.name) for linear in names.readers]
        self.output: nn.Linear = getattr(self.stock, names.writer.name)
        index: Any = None if self.is_mlp else self.stock.layer_idx
        self.window = None if self.is_mlp else layer.family.window(layer.config, index)

    @classmethod
    def all_of(cls, layer: RewiredLayer) -> list[RefitModule]:
        """Those of a layer, in the order in which they run."""
        return [cls(layer, *each) for each in zip(layer.family.modules, layer.wirings, strict=True)]

    def read(self, stream: ResidualStream) -> tuple[torch.Tensor, ResidualStream]:
        """The view, [B, T, H] or [r, B, T, H], and the stream after the read."""
        return stream.read(self.wiring, self.gain, self.shards)

    def fresh(self, stream: ResidualStream) -> torch.Tensor:
        """What it would read of `stream` if all had been reduced, [B, T, H].

        Local parts are merged as the module says that takes them along; one that takes none adds to its own region's.
        """
        return stream.total(self.shards, self.wiring.merge if self.wiring.takes_local else self.wiring.region.merge)

    def total(self, written: ResidualStream) -> torch.Tensor:
        """All that was contributed to the stream after its write, [B, T, H]."""
        return written.total(self.shards, self.wiring.region.merge)

    def hidden(self, view: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        """The input of the module's last projection, [B, T, A]."""
        reads_shards = self.wiring.reads_shards
        inputs = self.norm(view)
        inputs = pack_shards(inputs) if reads_shards else inputs
        if self.is_mlp:
            return self._run(reads_shards, inputs)
        return self._run(reads_shards, inputs, position_embeddings, attention_mask=self._mask(view))[0]

    def _mask(self, view: torch.Tensor) -> torch.Tensor | None:
        """Which tokens see which, [1, 1, T, T]; None where each sees all before it."""
        tokens = view.shape[-2]
        if self.window is None or tokens <= self.window:
            return None
        return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=view.device).tril().triu(1 - self.window)

    def neurons(self, normalised: torch.Tensor) -> torch.Tensor:
        """The activations of an MLP's neurons, [n, A], if all of them read the same `normalised` view, [n, H]."""
        return self._run(False, normalised * self.norm.weight)

    def own_neurons(self, normalised: torch.Tensor) -> torch.Tensor:
        """The activations of an MLP's neurons, [n, A], each on its own shard's `normalised` view, [r, n, H]."""
        return self._run(True, pack_shards((normalised * self.norm.weight)[:, None]))[0]

    def _run(self, reads_shards: bool, *args: Any, **kwargs: Any) -> Any:
        """The stock module's own forward, with the identity for a last projection."""
        module = _WithoutLastProjection(self.stock, self.names, self.shards, reads_shards, gives_partials=False)
        return self.stock.stock_class.forward(module, *args, **kwargs)

    def write(self, stream: ResidualStream, hidden: torch.Tensor) -> ResidualStream:
        """The stream after the module's last projection of `hidden`, [B, T, A], was written to it."""
        if self.wiring.gives_partials:
            return stream.write(row_parallel(self.output, self.shards, hidden), self.wiring, self.shards)
        return stream.write(self.output(hidden), self.wiring, self.shards)

    def normalised(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """n(x), the RMS-normalised x without the norm's weight: what an input's matrix is fitted on."""
        return rms_norm(hidden_states, hidden_states.shape[-1:], eps=self.norm.variance_epsilon)

    def fold_input(self, delta: torch.Tensor) -> None:
        """Let the module read gamma * (n(view) (I + delta)), delta [1 or r, H, H]: gamma becomes 1, and W
        becomes W diag(gamma) (I + delta)^T.

        Where views differ per shard, each shard's rows take its own matrix.
        """
        gamma = self.norm.weight.clone()
        self.norm.weight.fill_(1.0)
        for projection in self.inputs:
            rows = (projection.weight * gamma).unflatten(0, (len(delta), -1))  # [1 or r, out / r, H]
            projection.weight.copy_((rows + rows @ delta.mT).flatten(0, 1))

    def fold_output(self, delta: torch.Tensor) -> None:
        """Let the last projection add `hidden @ delta` to the stream, delta [A, H].

        Of what stays local, a mean will fold one part in r: r times as much is added.
        """
        added = delta.T
        if self.wiring.region.merge == "mean":
            first, local = added.tensor_split([self.wiring.shared_channels])
            added = torch.cat([first, local * self.shards.total])
        self.output.weight.add_(added)

    def reorder_neurons(self, order: torch.Tensor) -> None:
        """Let the n-th neuron of an MLP be the one that was the `order[n]`-th."""
        for projection in self.inputs:
            for parameter in projection.parameters():
                parameter.copy_(parameter[order])
        self.output.weight.copy_(self.output.weight[:, order])


class _WithoutLastProjection(OnShards):
    """A module as its own `forward` should see it, with the identity for a last projection."""

    def __getattr__(self, name: str) -> Any:
        return nn.Identity() if name == self.writer else super().__getattr__(name)
