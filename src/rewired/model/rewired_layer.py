"""A decoder layer on the residual stream: read, norm, module, write; twice. It is written once, for all families.

A family's layer is this before the stock one: `class RewiredLlamaDecoderLayer(RewiredLayer, LlamaDecoderLayer)`. The
stock constructor builds, and `rewire` changes what it built in place. The wiring decides what a read sees and a write
reduces; no wiring has a layer class of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn

from .family import Family, Module
from .residual_stream import PeekGain, ResidualStream
from .sharding import OnShards, Shards, pack_shards
from .wiring import ModuleWiring

Wirings = tuple[ModuleWiring, ModuleWiring]  # of a layer's modules
StandIns = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]  # for a module's projections, by their names


class RewiredLayer(nn.Module):
    """Before a stock decoder layer among the bases of a class."""

    family: ClassVar[Family]
    wirings: Wirings
    shards: Shards

    def __init__(self, config: Any, layer_idx: int, wirings: Wirings) -> None:
        super().__init__(config, layer_idx)
        self.rewire(config, layer_idx, wirings)

    def rewire(self, config: Any, layer_idx: int, wirings: Wirings) -> None:
        """Make a rewired layer of what the stock constructor has built."""
        self.config, self.wirings, self.layer_idx = config, wirings, layer_idx
        gives_partials = any(module.gives_partials for module in config.resolved_wiring.modules)
        rounds_by_shard = gives_partials and getattr(config, "quantization_config", None) is not None
        for module, wiring in zip(self.family.modules, wirings, strict=True):
            stock: Any = self.get_submodule(module.path)
            stock.__class__ = with_shard_axis(type(stock))  # type: ignore[arg-type]
            stock.names, stock.wiring = module, wiring
            stock.rounds_by_shard = rounds_by_shard
            setattr(self, module.gain, _peek_gain(config, wiring))
        self.place(Shards(config.tp_shards, config.tp_shards))

    def place(self, shards: Shards) -> None:
        """Say which of the logical shards this process holds; all of them, unless tensor parallelism says otherwise."""
        self.shards = shards
        for module in self.family.modules:
            self.get_submodule(module.path).shards = shards  # type: ignore[assignment]

    def forward(self, hidden_states: torch.Tensor | ResidualStream, **kwargs: Any) -> torch.Tensor | ResidualStream:
        """The stream in, the stream out; the model's first layer takes the embedding, its last gives hidden states."""
        shards = self.shards
        stream = ResidualStream.open(hidden_states, shards)
        for module, wiring in zip(self.family.modules, self.wirings, strict=True):
            stock = getattr(self, module.path)
            stand_ins = self.stand_ins(stock)
            view, stream = stream.read(wiring, getattr(self, module.gain), shards)  # [B, T, H] or [r, B, T, H]
            normalised = getattr(self, module.norm)(view)
            if module.is_attention:
                output, _ = stock(hidden_states=normalised, stand_ins=stand_ins, **kwargs)
            else:
                output = stock(normalised, stand_ins=stand_ins)
            stream = stream.write(output, wiring, shards)
        is_last = self.layer_idx == self.config.num_hidden_layers - 1  # an assistant may exit early
        return stream.total(shards) if is_last else stream

    def stand_ins(self, stock: nn.Module) -> StandIns | None:
        """What stands in for projections of a module in this pass. A training may install its own; asked for before
        the module reads the stream."""
        return None


@cache
def with_shard_axis(stock: type[nn.Module]) -> type[nn.Module]:
    """The class of a stock attention or MLP whose projections carry the shard axis where its wiring asks for one."""

    class WithShardAxis(stock):  # type: ignore[misc, valid-type]
        stock_class = stock
        names: Module
        wiring: ModuleWiring
        shards: Shards
        rounds_by_shard: bool  # of each shard's own activations, as its rank would

        def forward(self, hidden_states: torch.Tensor, stand_ins: StandIns | None = None, **kwargs: Any) -> Any:
            """[B, T, H] or [r, B, T, H] in; [B, T, H] or, if the wiring gives partials, [r, B, T, H] out."""
            wiring, shards = self.wiring, self.shards
            whole = not (wiring.reads_shards or wiring.gives_partials or self.rounds_by_shard)
            if shards.group is None and whole:
                return stock.forward(self, hidden_states, **kwargs)
            packed = pack_shards(hidden_states) if wiring.reads_shards else hidden_states
            module = OnShards(self, self.names, shards, wiring.reads_shards, wiring.gives_partials, stand_ins)
            return stock.forward(module, packed, **kwargs)

        def __reduce__(self) -> tuple[Any, ...]:
            """How to pickle one of a class that has no name in a module."""
            return _without_state, (stock,), self.__dict__

    WithShardAxis.__name__ = WithShardAxis.__qualname__ = f"Rewired{stock.__name__}"
    return WithShardAxis


def _without_state(stock: type[nn.Module]) -> nn.Module:
    made = with_shard_axis(stock)  # type: ignore[arg-type]
    return made.__new__(made)


def _peek_gain(config: Any, wiring: ModuleWiring) -> PeekGain | None:
    return PeekGain(config.tp_shards, config.hidden_size) if wiring.reads_shards else None
