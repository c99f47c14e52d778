"""The residual stream: what a module reads, and where its output goes. The heart of the project.

A tensor-parallel Llama with r shards keeps, between two modules:

    settled    S    the embedding and every update landed so far; equal on all shards
    in flight  u    reductions that were launched and have not landed yet, in order, each with
      payload  q^k  what shard k put into it
      rest     e^k  what rounding leaves of u where shard k adds it up; known when u has landed
    local      d^k  what shard k contributed and has not been reduced yet, and what rounding left it

A module that reads n updates late lets all reductions land but those of the last n modules, and sees
`S + [peek] g * (d^k + sum of q^k)`. When it writes, all land that the next module does not leave in flight, and its own
is launched. A tensor that differs per shard has a leading shard axis; all others have none. Under tensor parallelism
the shard axis holds this rank's shards, and the reductions run over the ranks: `collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from .collectives import came_with, land, land_and_launch, launch, split_gradient, sum_gradients
from .reductions import Reduction, add, finish, own
from .sharding import Shards, on_this_rank
from .wiring import ModuleWiring


class Update(NamedTuple):
    """An update in flight: one reduction, between its launch and its landing."""

    total: torch.Tensor  # [B, T, C], the first C of H channels; only `land` may read it
    payload: torch.Tensor | None = None  # [r, B, T, C], kept only where a module that reads late peeks
    rest: torch.Tensor | None = None  # [r, B, T, C], only of a quantised sum; only `land` may read it


class ResidualStream(NamedTuple):
    """The stream between two modules. A tuple, so that checkpointing, FSDP and `torch.compile` see its tensors."""

    settled: torch.Tensor  # [B, T, H]
    in_flight: tuple[Update, ...] = ()  # the oldest first
    local: torch.Tensor | None = None  # [r, B, T, H]

    @classmethod
    def open(cls, hidden_states: torch.Tensor | ResidualStream, shards: Shards) -> ResidualStream:
        """The stream at the model's entry, where it is only the embedding; a stream stays itself.

        Tools that run one layer after another, such as llm-compressor, may hand it on as a plain tuple.
        """
        if isinstance(hidden_states, tuple):
            settled, in_flight, local = hidden_states
            return cls(settled, tuple(Update(*update) for update in in_flight), local)
        return cls(sum_gradients(shards.group, hidden_states)[0])

    def read(self, wiring: ModuleWiring, gain: PeekGain | None, shards: Shards) -> tuple[torch.Tensor, ResidualStream]:
        """A module's view, [B, T, H] or, where shards differ, [r, B, T, H]; and the stream after the read."""
        stream = self._land(len(self.in_flight) - wiring.late, shards)  # which the module has waited for
        if not wiring.reads_shards:
            return stream.settled, stream
        assert gain is not None, "a module that reads shards has a gain"
        return gain(stream.settled, stream.own_parts()), stream

    def write(
        self,
        output: torch.Tensor,
        wiring: ModuleWiring,
        shards: Shards,
        sum_at_once: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> ResidualStream:
        """Land what is not to stay in flight, then reduce `output` as the wiring says, or keep it local.

        `output` holds the shards' partial sums, [r, B, T, H], where the wiring `gives_partials`; else their sum,
        [B, T, H]. `sum_at_once` is an engine's own all-reduce, for where nothing hides one and nothing is quantised.
        """
        landing = self.in_flight[: len(self.in_flight) - wiring.keeps]
        if len(landing) > 1 or (landing and (landing[0].rest is not None or not wiring.launches)):
            # before anything is sent, of which the rest is a part
            return self._land(1, shards, after=output).write(output, wiring, shards, sum_at_once)
        kept = self.in_flight[len(landing) :]
        if not wiring.launches:
            return ResidualStream(self.settled, kept, output if self.local is None else output + self.local)
        sent, first, others = self._shared_out(output, wiring, shards)
        reduction = Reduction(shards.group, wiring.sections)
        put_in = reduction.put_in(sent) if wiring.gives_partials else sent
        if wiring.sections or not sum_at_once:
            before = landing[0].total if landing else None
            settled, outcome = land_and_launch(self.settled, before, put_in, reduction, wiring.overlapped)
        else:
            summed = own(put_in) if wiring.keeps_payload else put_in  # it may be in place
            total = sum_at_once(summed.contiguous())
            settled, outcome = self._land(len(landing), shards, after=put_in).settled, (total,)
        rest = None
        if wiring.keeps_rest:
            first, rest = outcome[1:]
            sent = sent - first
        update = Update(outcome[0], sent if wiring.keeps_payload else None, rest)
        return ResidualStream(settled, (*kept, update), _joined(first, others, wiring.shared_channels))

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

    def total(self, shards: Shards, merge: str = "sum") -> torch.Tensor:
        """Everything contributed so far, [B, T, H]: what the final norm reads after the last module.

        Before that, some parts may be local: they count as `merge` will fold them.
        """
        stream = self._land(len(self.in_flight), shards)
        settled, local = stream.settled, stream.local
        if local is not None:
            local = local / shards.total if merge == "mean" else local
            plain = Reduction(shards.group)
            settled = land(settled, launch(plain.put_in(local), plain)[0], shards.group)
        return split_gradient(settled, shards.ranks)

    def _land(self, count: int, shards: Shards, after: torch.Tensor | None = None) -> ResidualStream:
        """The stream after its `count` oldest reductions in flight have landed."""
        assert count >= 0, "what a module leaves in flight is there"
        settled, in_flight, local = self
        for total, _, rest in in_flight[:count]:
            settled = land(settled, total, shards.group, after)
            if rest is not None:
                left = came_with(settled, rest, shards.group)  # of parts that a module in between may have taken
                local = pad(left, (0, settled.shape[-1] - left.shape[-1])) if local is None else add(local, left)
        return ResidualStream(settled, in_flight[count:], local)

    def own_parts(self) -> torch.Tensor:  # [r, B, T, H]
        # a payload of some channels only has left the others in `local`, and rounding has left something, too
        parts = [self.local, *(update.payload for update in self.in_flight)]
        widest, *others = sorted((part for part in parts if part is not None), key=lambda part: -part.shape[-1])
        return reduce(add, others, widest)

    @classmethod
    def with_update(cls, settled: torch.Tensor, update: torch.Tensor) -> ResidualStream:
        """The stream of an engine that has not added the last update yet, [B, T, H] both."""
        return cls(settled, (Update(update),))

    @property
    def whole_update(self) -> torch.Tensor | None:
        """What is in flight, [B, T, H], for an engine that adds it itself; None where that is not all to be done."""
        if len(self.in_flight) != 1 or self.in_flight[0].rest is not None:
            return None
        (update,) = self.in_flight
        return update.total if update.total.shape == self.settled.shape else None

    def arrived(self) -> ResidualStream:
        """The same stream, its updates complete, for an engine that reads them as they are."""
        return self._replace(in_flight=tuple(update._replace(total=finish(update.total)) for update in self.in_flight))


class PeekGain(nn.Module):
    """The gain g on own parts that are not reduced yet, per shard and channel. Weight: [r, H], rows of this rank."""

    def __init__(self, tp_shards: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(tp_shards, hidden_size))

    def forward(self, settled: torch.Tensor, own_parts: torch.Tensor) -> torch.Tensor:
        gain = on_this_rank(self.weight).to(settled.dtype)  # a training may hold it in more bits
        return torch.addcmul(settled, own_parts, gain if len(gain) == 1 else gain[:, None, None])  # [r, B, T, H]


def _cut(tensor: torch.Tensor, wiring: ModuleWiring) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The channels that a write reduces, and the others. All of them are not cut: that would copy gradients."""
    if wiring.reduce == "all":
        return tensor, None
    first, others = tensor.tensor_split([wiring.shared_channels], dim=-1)
    return first, others


def _joined(first: torch.Tensor | None, others: torch.Tensor | None, channels: int) -> torch.Tensor | None:
    """The inverse; zeros where only the first are missing."""
    if others is None or others.shape[-1] == 0:
        return first
    return pad(others, (channels, 0)) if first is None else torch.cat([first, others], dim=-1)
