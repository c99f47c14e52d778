"""The residual stream: what a module reads, and where its output goes. The heart of the project.

A tensor-parallel Llama with r shards keeps, between two modules:

    settled    S    the embedding and every update landed so far; equal on all shards
    in flight  u    one reduction that was launched and has not landed yet, with
      payload  q^k  what shard k put into it
      rest     e^k  what rounding leaves of u where shard k adds it up; known when u has landed
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

from .collectives import came_with, land, land_and_launch, launch, split_gradient, sum_gradients
from .reductions import add, finish, reduction_of
from .sharding import Shards, on_this_rank
from .wiring import ModuleWiring


class Update(NamedTuple):
    """An update in flight: one reduction, between its launch and its landing."""

    total: torch.Tensor  # [B, T, C], the first C of H channels; only `land` may read it
    payload: torch.Tensor | None = None  # [r, B, T, C], kept only where the next module peeks
    rest: torch.Tensor | None = None  # [r, B, T, C], only of a quantised sum; only `land` may read it


class ResidualStream(NamedTuple):
    """The stream between two modules. A tuple, so that checkpointing, FSDP and `torch.compile` see its tensors."""

    settled: torch.Tensor  # [B, T, H]
    in_flight: Update | None = None
    local: torch.Tensor | None = None  # [r, B, T, H]

    @classmethod
    def open(cls, hidden_states: torch.Tensor | ResidualStream, shards: Shards) -> ResidualStream:
        """The stream at the model's entry, where it is only the embedding; a stream stays itself.

        Tools that run one layer after another, such as llm-compressor, may hand it on as a plain tuple.
        """
        if isinstance(hidden_states, tuple):
            settled, in_flight, local = hidden_states
            return cls(settled, None if in_flight is None else Update(*in_flight), local)
        return cls(sum_gradients(shards.group, hidden_states)[0])

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
        [B, T, H]. `sum_at_once` is an engine's own all-reduce, for where nothing hides one and nothing is quantised.
        """
        if self.in_flight is not None and self.in_flight.rest is not None:  # it belongs to what is reduced now
            return self._land(shards, after=output).write(output, wiring, shards, sum_at_once)
        if not wiring.launches:
            local = output if self.local is None else output + self.local
            return ResidualStream(self._land(shards, after=output).settled, local=local)
        sent, first, others = self._shared_out(output, wiring, shards)
        reduction = reduction_of(shards.group, wiring.sections)
        put_in = reduction.put_in(sent) if wiring.gives_partials else sent
        if wiring.sections or not sum_at_once:
            before = None if self.in_flight is None else self.in_flight.total
            settled, outcome = land_and_launch(self.settled, before, put_in, reduction, wiring.overlapped)
        else:
            settled, outcome = self._land(shards, after=put_in).settled, (sum_at_once(put_in),)
        if not wiring.keeps_rest:
            payload = sent if wiring.keeps_payload else None
            return ResidualStream(settled, Update(outcome[0], payload), _joined(first, others, wiring.shared_channels))
        total, left, rest = outcome
        payload = sent - left if wiring.keeps_payload else None
        return ResidualStream(settled, Update(total, payload, rest), _joined(left, others, wiring.shared_channels))

    def _shared_out(
        self, output: torch.Tensor, wiring: ModuleWiring, shards: Shards
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What a write sends, the first C channels, and what stays local, of those and of the others."""
        sent, others = _cut(output, wiring)
        if self.local is None:
            return sent, None, others
        first, local = _cut(self.local, wiring)
        others = None if others is None or local is None else others + local
        if not wiring.takes_local:
            return sent, first, others
        taken = first / shards.total if wiring.merge == "mean" else first
        return sent + (taken if wiring.gives_partials else taken.sum(0)), None, others

    def total(self, shards: Shards) -> torch.Tensor:
        """Everything contributed so far, [B, T, H]: what the final norm reads after the last module."""
        stream = self._land(shards)
        settled, local = stream.settled, stream.local
        if local is not None:
            plain = reduction_of(shards.group)
            settled = land(settled, launch(plain.put_in(local), plain)[0], shards.group)
        return split_gradient(settled, shards.ranks)

    def _land(self, shards: Shards, after: torch.Tensor | None = None) -> ResidualStream:
        if self.in_flight is None:
            return self
        (total, _, rest), local = self.in_flight, self.local
        settled = land(self.settled, total, shards.group, after)
        if rest is not None:
            assert local is not None, "where the sum was rounded, so were the parts"
            local = add(local, came_with(settled, rest, shards.group))
        return ResidualStream(settled, local=local)

    def own_parts(self) -> torch.Tensor:  # [r, B, T, H]
        if self.in_flight is None or self.in_flight.payload is None:
            assert self.local is not None, "a module that reads shards has own parts to see"
            return self.local
        # a payload of some channels only has left the others in `local`, and rounding has left something, too
        payload = self.in_flight.payload
        return payload if self.local is None else add(self.local, payload)

    @classmethod
    def with_update(cls, settled: torch.Tensor, update: torch.Tensor) -> ResidualStream:
        """The stream of an engine that has not added the last update yet, [B, T, H] both."""
        return cls(settled, Update(update))

    @property
    def whole_update(self) -> torch.Tensor | None:
        """What is in flight, [B, T, H], for an engine that adds it itself; None where that is not all to be done."""
        if self.in_flight is None or self.in_flight.rest is not None:
            return None
        return self.in_flight.total if self.in_flight.total.shape == self.settled.shape else None

    def arrived(self) -> ResidualStream:
        """The same stream, its update complete, for an engine that reads it as it is."""
        assert self.in_flight is not None
        return self._replace(in_flight=self.in_flight._replace(total=finish(self.in_flight.total)))


class PeekGain(nn.Module):
    """The gain g on own parts that are not reduced yet, per shard and channel. Weight: [r, H], rows of this rank."""

    def __init__(self, tp_shards: int, hidden_size: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.full((tp_shards, hidden_size), initial))

    def forward(self, settled: torch.Tensor, own_parts: torch.Tensor) -> torch.Tensor:
        gain = on_this_rank(self.weight).to(settled.dtype)  # a training may hold it in more bits
        return torch.addcmul(settled, own_parts, gain[:, None, None, :])  # [r, B, T, H]


def _cut(tensor: torch.Tensor, wiring: ModuleWiring) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The channels that a write reduces, and the others. A plain sum of all is not cut: that would copy gradients."""
    if wiring.reduce == "all" and not wiring.sections:
        return tensor, None
    first, others = tensor.tensor_split([wiring.shared_channels], dim=-1)
    return first, others


def _joined(first: torch.Tensor | None, others: torch.Tensor | None, channels: int) -> torch.Tensor | None:
    """The inverse; zeros where only the first are missing."""
    if others is None or others.shape[-1] == 0:
        return first
    return pad(others, (channels, 0)) if first is None else torch.cat([first, others], dim=-1)
