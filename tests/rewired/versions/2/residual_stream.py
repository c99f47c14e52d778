"""The residual stream: what a module reads, and where its output goes. The heart of the project.

A tensor-parallel Llama with r shards keeps, between two modules:

    settled    S    the embedding and every update landed so far; equal on all shards
    in flight  u    one reduction that was launched and has not landed yet
    payload    q^k  what shard k put into that reduction
    rest       e^k  what rounding leaves of u where shard k adds it up; known when u has landed
    local      d^k  what shard k contributed and has not been reduced yet, and what rounding left it

Every wiring reads `S + [wait] u + [peek] g * (d^k + [not wait] q^k)` and writes by landing u, then launching the
next reduction. A tensor that differs per shard has a leading shard axis; all others have none. Under tensor
parallelism the shard axis holds this rank's shards, and the reductions run over the ranks: `collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from .collectives import (
    add,
    land,
    land_and_launch,
    land_and_launch_quantised,
    landed,
    launch,
    split_gradient,
    sum_gradients,
)
from .sharding import Shards, on_this_rank
from .wiring import ModuleWiring


class ResidualStream(NamedTuple):
    """The stream between two modules. A tuple, so that checkpointing, FSDP and `torch.compile` see its tensors."""

    settled: torch.Tensor  # [B, T, H]
    in_flight: torch.Tensor | None = None  # [B, T, C], the first C of H channels; only `land` may read it
    payload: torch.Tensor | None = None  # [r, B, T, C], kept only where the next module peeks
    local: torch.Tensor | None = None  # [r, B, T, H]
    rest: torch.Tensor | None = None  # [r, B, T, C], only of a quantised sum; only `land` may read it

    @classmethod
    def open(cls, hidden_states: torch.Tensor | ResidualStream, shards: Shards) -> ResidualStream:
        """The stream at the model's entry, where it is only the embedding; a stream stays itself."""
        if isinstance(hidden_states, ResidualStream):
            return hidden_states
        return cls(*sum_gradients(shards.group, hidden_states))

    def read(self, wiring: ModuleWiring, gain: PeekGain | None, shards: Shards) -> tuple[torch.Tensor, ResidualStream]:
        """A module's view, [B, T, H] or, where shards differ, [r, B, T, H]; and the stream after the read."""
        stream = self.after_read(wiring, shards)
        if not wiring.reads_shards:
            return stream.settled, stream
        assert gain is not None, "a module that reads shards has a gain"
        return gain(stream.settled, stream.own_parts()), stream

    def after_read(self, wiring: ModuleWiring, shards: Shards) -> ResidualStream:
        """The stream after a module has read it: a reduction that it waited for has landed."""
        return self._land(shards) if wiring.wait else self

    def write(
        self,
        output: torch.Tensor,
        wiring: ModuleWiring,
        shards: Shards,
        sum_at_once: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> ResidualStream:
        """Land the reduction in flight, then reduce `output` as the wiring says, or keep it local.

        `output` holds the shards' partial sums, [r, B, T, H], where the wiring `gives_partials`; else their sum,
        [B, T, H]. `sum_at_once` is an engine's own all-reduce, for where nothing hides one.
        """
        if self.rest is not None:  # it belongs to what is reduced now
            return self._land(shards, after=output).write(output, wiring, shards, sum_at_once)
        if wiring.sections:
            return self._write_quantised(output, wiring, shards)
        local = self.local
        if wiring.reduce == "none":
            return ResidualStream(self._land(shards, after=output).settled, local=_plus(output, local))
        if wiring.reduce == "shared":
            channels = wiring.shared_channels
            local = _plus(pad(output[..., channels:], (channels, 0)), local)
            output = output[..., :channels]
        elif local is not None:
            folded = _folded(local, wiring, shards)
            output = output + (folded if wiring.gives_partials else folded.sum(0))
            local = None
        own = output.sum(0) if wiring.gives_partials else output
        if sum_at_once:
            settled, in_flight = self._land(shards, after=own).settled, sum_at_once(own)
        else:
            settled, in_flight = land_and_launch(self.settled, self.in_flight, own, shards.group, wiring.overlapped)
        return ResidualStream(settled, in_flight, output if wiring.keeps_payload else None, local)

    def _write_quantised(self, output: torch.Tensor, wiring: ModuleWiring, shards: Shards) -> ResidualStream:
        """Channels that are sent take along what is local of them, and what rounding leaves of them stays local."""
        sent, kept = output.tensor_split([wiring.shared_channels], dim=-1)
        if self.local is not None:
            local_sent, local_kept = self.local.tensor_split([wiring.shared_channels], dim=-1)
            sent, kept = sent + _folded(local_sent, wiring, shards), kept + local_kept
        settled, (in_flight, left, rest) = land_and_launch_quantised(
            self.settled, self.in_flight, sent, shards.group, wiring.overlapped, wiring.sections
        )
        if not wiring.keeps_rest:
            return ResidualStream(settled, in_flight, sent if wiring.keeps_payload else None)
        local = torch.cat([left, kept], dim=-1) if kept.shape[-1] else left
        return ResidualStream(settled, in_flight, sent - left if wiring.keeps_payload else None, local, rest)

    def total(self, shards: Shards) -> torch.Tensor:
        """Everything contributed so far, [B, T, H]: what the final norm reads after the last module."""
        stream = self._land(shards)
        settled, local = stream.settled, stream.local
        if local is not None:
            settled = land(settled, launch(local.sum(0), shards.group), shards.group)
        return split_gradient(settled, shards.ranks)

    def _land(self, shards: Shards, after: torch.Tensor | None = None) -> ResidualStream:
        if self.in_flight is None:
            return self
        settled, local = land(self.settled, self.in_flight, shards.group, after), self.local
        if self.rest is not None:
            assert local is not None, "where the sum was rounded, so were the parts"
            local = add(local, landed(self.rest, settled, shards.group))
        return ResidualStream(settled, local=local)

    def own_parts(self) -> torch.Tensor:  # [r, B, T, H]
        if self.payload is None:
            assert self.local is not None, "a module that reads shards has own parts to see"
            return self.local
        # a payload of some channels only has left the others in `local`, and rounding has left something, too
        return self.payload if self.local is None else add(self.local, self.payload)


class PeekGain(nn.Module):
    """The gain g on own parts that are not reduced yet, per shard and channel. Weight: [r, H], rows of this rank."""

    def __init__(self, tp_shards: int, hidden_size: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.full((tp_shards, hidden_size), initial))

    def forward(self, settled: torch.Tensor, own_parts: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(settled, own_parts, on_this_rank(self.weight)[:, None, None, :])  # [r, B, T, H]


def _folded(local: torch.Tensor, wiring: ModuleWiring, shards: Shards) -> torch.Tensor:
    """What a reduction takes of local parts."""
    return local / shards.total if wiring.merge == "mean" else local


def _plus(output: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor:
    return output if local is None else output + local
