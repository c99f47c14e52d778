"""A rewired model on vLLM's own modules: their attention, kernels, cache and weight loading; our residual stream.

vLLM passes an update and the stream that it belongs to from layer to layer, so that a fused kernel adds and normalises
them. A module that waits for a whole update reads through that kernel, as in vLLM's own layers; every other read is the
residual stream's. Activations are [T, H], the tokens of a batch in a row; where shards differ, [held, T, H] of those
that the rank holds, which is one where there are as many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from rewired.model.family import Family, Module
from rewired.model.reductions import own, start_sums_by
from rewired.model.residual_stream import PeekGain, ResidualStream
from rewired.model.sharding import Shards
from rewired.model.wiring import ModuleWiring

from .checks import ends_dense, has_bias, overlaps, overlaps_by_engine
from .held_shards import HeldGain, hold_shards
from .side_stream import SideSums


class RewiredForCausalLM:
    """Before vLLM's own class of a family among the bases of ours; its layers become rewired ones, in place."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        group = get_tp_group()
        if (
            current_platform.is_cuda_alike()
            and group.world_size > 1
            and overlaps_by_engine(vllm_config.model_config.hf_config)
        ):
            _put_beside_compute(group)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        config = vllm_config.model_config.hf_config
        base = getattr(self, config.family.base)
        base.__class__, base.shards = _with_whole_streams(type(base)), _shards(config)  # type: ignore[arg-type]
        for index, layer in enumerate(base.get_submodule(config.family.layers)):
            if not isinstance(layer, PPMissingLayer):
                layer.__class__ = _rewired(type(layer))  # type: ignore[arg-type]
                layer.rewire(config, index)

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The names of what is loaded. Gains that a checkpoint does not hold are at their initial value."""
        gains = {name for name, _ in self.named_parameters() if name.endswith("_gain.weight")}
        return super().load_weights(weights) | gains  # type: ignore[misc]


@cache
def _rewired(stock: type) -> type:
    """The rewired class of vLLM's own decoder layer."""
    return type(f"Rewired{stock.__name__}", (RewiredLayer, stock), {})


@cache
def _with_whole_streams(stock: type) -> type:
    """The class of a model without its head that gives drafts such as EAGLE-3's the whole stream between layers."""

    class WithWholeStreams(stock):
        shards: Shards

        def _maybe_add_hidden_state(self, states: Any, index: int, hidden_states: Any, residual: Any) -> Any:
            """vLLM's own; one more reduction, where something is local or in flight and a draft reads it."""
            if index in self.aux_hidden_state_layers and isinstance(residual, ResidualStream):
                hidden_states, residual = residual.total(self.shards), None
            return super()._maybe_add_hidden_state(states, index, hidden_states, residual)

    return WithWholeStreams


class RewiredLayer(nn.Module):
    """Read, norm, module, write; twice."""

    def rewire(self, config: Any, index: int) -> None:
        """Make a rewired layer of what vLLM's own constructor has built."""
        self.family: Family = config.family
        self.wirings = config.resolved_wiring.layers[index]
        self.follows_overlap = index > 0 and config.resolved_wiring.layers[index - 1][1].overlapped
        self.shards = _shards(config)
        self.overlap = overlaps(config)
        for module, wiring in zip(self.family.modules, self.wirings, strict=True):
            setattr(self, module.gain, _peek_gain(config, wiring, self.shards))
            writer = self._writer(module)
            if writer.bias is None and has_bias(config, module.writer):
                raise ValueError(
                    f"vLLM's {self.family.name} has no bias in {module.writer.name}, as this model has: run it with "
                    "transformers, by rewired generate."
                )
            writer.reduce_results = False  # the stream reduces
            writer.skip_bias_add = self.shards.total > 1  # a bias counts as its part on each shard
            if self.shards.held > 1:
                hold_shards(self.get_submodule(module.path), wiring, self.shards.held)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | ResidualStream | None,
        **unused: None,  # vLLM's Mistral hands on what only its multimodal relatives set
    ) -> tuple[torch.Tensor, torch.Tensor | ResidualStream]:
        stream = _received(hidden_states, residual)
        follows_overlap = self.follows_overlap
        for module, wiring in zip(self.family.modules, self.wirings, strict=True):
            stock = self.get_submodule(module.path)
            view, stream = self._read(stream, wiring, getattr(self, module.gain), getattr(self, module.norm))  # [T, H]
            output = stock(positions=positions, hidden_states=view) if module.is_attention else stock(view)
            stream = self._write(stream, output, self._writer(module), wiring, follows_overlap)
            follows_overlap = wiring.overlapped
        return _passed_on(stream, self.wirings[-1])

    def _writer(self, module: Module) -> Any:
        return getattr(self.get_submodule(module.path), module.writer.name)

    def _read(
        self, stream: ResidualStream, wiring: ModuleWiring, gain: PeekGain | None, norm: Any
    ) -> tuple[torch.Tensor, ResidualStream]:
        """The normalised view of a module, [T, H], and the stream after the read."""
        update = stream.whole_update
        if wiring.wait and not wiring.reads_shards and update is not None:
            view, settled = norm(update, stream.settled)
            return view, ResidualStream(settled, local=stream.local)
        view, stream = stream.read(wiring, gain, self.shards)  # [T, H], or [held, T, H] where shards differ
        return norm(view.flatten(0, -2)), stream

    def _write(
        self, stream: ResidualStream, output: torch.Tensor, projection: Any, wiring: ModuleWiring, follows_overlap: bool
    ) -> ResidualStream:
        if wiring.is_rewired or wiring.overlapped:
            output = own(output)
        if self.shards.total > 1 and projection.bias is not None:
            output = output + projection.bias / (self.shards.total if wiring.gives_partials else self.shards.ranks)
        if wiring.gives_partials and self.shards.held == 1:
            output = output[None]  # [held, T, H]
        stream = stream.write(output, wiring, self.shards, self._sum_at_once(wiring, follows_overlap))
        if wiring.sections and ends_dense(wiring):  # quantised, so under way; what reads it next may be vLLM's own norm
            stream = stream.arrived()
        return stream

    def _sum_at_once(
        self, wiring: ModuleWiring, follows_overlap: bool
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """vLLM's fastest all-reduce, where nothing hides one; it may sum in place. What is quantised has its own."""
        if self.shards.group is None or (wiring.overlapped and self.overlap):
            return None
        if wiring.overlapped:
            return _sum_for_later
        if follows_overlap and self.overlap and self.shards.group in _side_streams:
            return partial(sum_after_those_beside, group=self.shards.group)
        return tensor_model_parallel_all_reduce


def _received(hidden_states: torch.Tensor, residual: torch.Tensor | ResidualStream | None) -> ResidualStream:
    """What vLLM passes from layer to layer, as a stream: at first the embedding alone."""
    if residual is None:
        return ResidualStream(hidden_states)
    if isinstance(residual, ResidualStream):
        return residual
    return ResidualStream.with_update(residual, hidden_states)


def _passed_on(stream: ResidualStream, wiring: ModuleWiring) -> tuple[torch.Tensor, torch.Tensor | ResidualStream]:
    """A stream as vLLM passes it on; `wiring` is that of the module that wrote it last.

    A whole update that whoever comes next waits for, be it a layer, another pipeline stage or the last norm, goes the
    way of vLLM's own.
    """
    if ends_dense(wiring):
        assert stream.whole_update is not None
        return stream.whole_update, stream.settled
    return stream.settled, stream


def _shards(config: Any) -> Shards:
    """The logical shards or, where the model's function does not depend on them, one for each rank."""
    group = get_tp_group()
    total = config.tp_shards if config.depends_on_shards else group.world_size
    return Shards(total, total // group.world_size, group.device_group.group_name if group.world_size > 1 else None)


_side_streams: dict[str, SideSums] = {}  # by process group; on a CPU there are none


def _put_beside_compute(group: Any) -> None:
    name = group.device_group.group_name
    if name not in _side_streams:
        _side_streams[name] = SideSums(group.all_reduce, group.device)
        start_sums_by(name, _side_streams[name].start)


@torch.library.custom_op("rewired::sum_after_those_beside", mutates_args=())
def sum_after_those_beside(output: torch.Tensor, group: str) -> torch.Tensor:
    """vLLM's all-reduce at once, where a compiler might else run it beside one that is under way."""
    _side_streams[group].join()
    return tensor_model_parallel_all_reduce(output)


sum_after_those_beside.register_fake(lambda output, group: torch.empty_like(output))


def _sum_for_later(output: torch.Tensor) -> torch.Tensor:
    return own(tensor_model_parallel_all_reduce(output))


def _peek_gain(config: Any, wiring: ModuleWiring, shards: Shards) -> HeldGain | None:
    """This rank's rows of a gain, [held, H]."""
    if not wiring.reads_shards:
        return None
    gain = HeldGain(shards.held, config.hidden_size)
    set_weight_attrs(gain.weight, {"weight_loader": partial(_load_rows_of_rank, total=shards.total)})
    return gain


def _load_rows_of_rank(parameter: nn.Parameter, loaded: torch.Tensor, total: int) -> None:
    if len(loaded) != total:
        raise ValueError(f"tp_shards is {total}, and the gains are those of {len(loaded)}.")
    held = parameter.shape[0]
    parameter.data.copy_(loaded[held * get_tp_group().rank_in_group :][:held])
