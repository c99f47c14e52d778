"""The residual stream: what a module reads, and where its output goes. The heart of the project.

A tensor-parallel Llama with r shards keeps, between two modules:

    settled    S    the embedding and every update merged so far; equal on all shards
    in flight  u    one reduction that was launched and is not merged yet
    payload    q^k  what shard k put into that reduction
    local      d^k  what shard k contributed and nobody has reduced yet

Every wiring reads `S + [wait] u + [peek] g * (d^k + [not wait] q^k)` and writes by merging u, then launching the
next reduction. A tensor that differs per shard has a leading shard axis r; all others have none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from .wiring import ModuleWiring


class ResidualStream(NamedTuple):
    """The stream between two modules. A tuple, so that checkpointing, FSDP and `torch.compile` see its tensors."""

    settled: torch.Tensor  # [B, T, H]
    in_flight: torch.Tensor | None = None  # [B, T, C], the first C of H channels
    payload: torch.Tensor | None = None  # [r, B, T, C], kept only where the next module peeks
    local: torch.Tensor | None = None  # [r, B, T, H]

    @classmethod
    def open(cls, hidden_states: torch.Tensor | ResidualStream) -> ResidualStream:
        """The stream at the model's entry, where it is only the embedding; a stream stays itself."""
        return hidden_states if isinstance(hidden_states, ResidualStream) else cls(hidden_states)

    def read(self, wiring: ModuleWiring, gain: PeekGain | None) -> tuple[torch.Tensor, ResidualStream]:
        """A module's view, [B, T, H] or, where shards differ, [r, B, T, H]; and the stream after the read."""
        stream = self._settle() if wiring.wait else self
        if not wiring.reads_shards:
            return stream.settled, stream
        assert gain is not None, "a module that reads shards has a gain"
        return gain(stream.settled, stream._own_parts()), stream

    def write(self, output: torch.Tensor, wiring: ModuleWiring) -> ResidualStream:
        """Merge the reduction in flight, then reduce `output` as the wiring says, or keep it local.

        `output` holds the shards' partial sums, [r, B, T, H], where the wiring `gives_partials`; else their sum,
        [B, T, H].
        """
        settled, _, _, local = self._settle()
        if wiring.reduce == "none":
            return ResidualStream(settled, local=_plus(output, local))
        if wiring.reduce == "shared":
            channels = wiring.shared_channels
            payload, private = output[..., :channels], pad(output[..., channels:], (channels, 0))
            return ResidualStream(settled, *_launch(payload, wiring), local=_plus(private, local))
        if local is not None:
            local = local / len(local) if wiring.merge == "mean" else local
            output = output + (local if wiring.gives_partials else local.sum(0))
        return ResidualStream(settled, *_launch(output, wiring))

    def total(self) -> torch.Tensor:
        """Everything contributed so far, [B, T, H]: what the final norm reads after the last module."""
        settled, _, _, local = self._settle()
        return settled if local is None else settled + local.sum(0)

    def _settle(self) -> ResidualStream:
        if self.in_flight is None:
            return self
        return ResidualStream(self.settled + _widen(self.in_flight, self.settled), local=self.local)

    def _own_parts(self) -> torch.Tensor:  # [r, B, T, H]
        if self.payload is None:
            assert self.local is not None, "a module that reads shards has own parts to see"
            return self.local
        return _plus(_widen(self.payload, self.settled), self.local)


class PeekGain(nn.Module):
    """The gain g on own parts that are not reduced yet, per shard and channel. Weight: [r, H]."""

    def __init__(self, tp_shards: int, hidden_size: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.full((tp_shards, hidden_size), initial))

    def forward(self, settled: torch.Tensor, own_parts: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(settled, own_parts, self.weight[:, None, None, :])  # [r, B, T, H]


def _launch(output: torch.Tensor, wiring: ModuleWiring) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reduction of `output` over the shards, and its payload if the next module peeks at it."""
    reduced = output.sum(0) if wiring.gives_partials else output
    return reduced, output if wiring.keeps_payload else None


def _plus(output: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor:
    return output if local is None else output + local


def _widen(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Zeros for the channels that were not reduced."""
    missing = like.shape[-1] - channels.shape[-1]
    return pad(channels, (0, missing)) if missing else channels
