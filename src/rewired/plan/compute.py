"""Compute times of a layer's modules on one rank, by the roofline: as slow as its arithmetic or its memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rewired.checkpoint.shape import Shape
from rewired.hardware import Hardware

from .engine import Engine
from .weights import BF16, Weights

_ITEM = 2  # bytes of a 16-bit number
_STREAM_PASSES = 6  # of a module over its rows: read and write around the norm, the products, and the addition
_QUANTISING_PASSES = 8  # over a module's output: packing, adding up, unpacking, and what rounding leaves of both
_QUANTISING_OVERHEAD = 3e-6  # three kernels


@dataclass(frozen=True)
class Step:
    """A forward pass: `new` tokens of each of `sequences`, which attend to `context` positions, their own included."""

    sequences: int
    new: int
    context: float

    @property
    def rows(self) -> int:
        return self.sequences * self.new


@dataclass(frozen=True)
class Rank:
    """One of `tp` ranks that share every layer of a model."""

    shape: Shape
    hardware: Hardware
    engine: Engine
    tp: int
    weights: Weights = BF16

    def attention(self, step: Step) -> float:
        return (
            self.products(step.rows, self._module_weights[0] / self.tp, self.weights)
            + self.scores(step)
            + self._stream(step.rows)
            + self.engine.attention_overhead
        )

    def mlp(self, step: Step) -> float:
        weights = self._module_weights[1]
        activations = weights // self.shape.hidden_size  # of a token, between the products
        return (
            self.products(step.rows, weights / self.tp, self.weights)
            + self._roofline(0, step.rows * activations / self.tp * _ITEM)
            + self._stream(step.rows)
            + self.engine.mlp_overhead
        )

    def head(self, step: Step) -> float:
        """The logits: of the last position, or of all where the engine computes them all."""
        weights = self.shape.head_weights / (self.tp if self.engine.shards_head else 1)
        return self.products(step.rows if self.engine.logits_of_prompt else step.sequences, weights)

    def quantising(self, step: Step) -> float:
        """What a payload's packing and unpacking take, where one kernel does each; on one rank nothing is packed."""
        passes = self._roofline(0, _QUANTISING_PASSES * step.rows * self.shape.hidden_size * _ITEM)
        return passes + _QUANTISING_OVERHEAD if self.tp > 1 else 0.0

    def products(self, rows: int, numbers: float, weights: Weights = BF16) -> float:
        """`rows` times matrices of so many `numbers` in all."""
        return self._roofline(2 * rows * numbers / weights.speed, weights.bytes * numbers)

    def scores(self, step: Step) -> float:
        """Queries against the cache. Flash attention skips the half of a prompt that is masked."""
        engine, head_dim = self.engine, self.shape.head_dim
        positions = max(engine.static_cache, step.context)
        heads = self.shape.num_attention_heads / self.tp
        kv_heads = max(1.0, self.shape.num_key_value_heads / self.tp)
        attended = positions if engine.score_passes else positions - (step.new - 1) / 2
        readers = heads * engine.cache_passes if engine.cache_passes else kv_heads
        cache = 2 * step.sequences * positions * head_dim * _ITEM * readers
        matrix = step.rows * heads * positions * _ITEM * engine.score_passes
        return self._roofline(4 * step.rows * attended * heads * head_dim, cache + matrix)

    @cached_property
    def _module_weights(self) -> list[int]:
        """The attention's and the MLP's."""
        return [self.shape.module_weights(module) for module in self.shape.family.modules]

    def _stream(self, rows: int) -> float:
        return self._roofline(0, _STREAM_PASSES * rows * self.shape.hidden_size * _ITEM)

    def _roofline(self, flops: float, size: float) -> float:
        arithmetic = flops / (self.hardware.flops * self.engine.flops_share)
        return max(arithmetic, size / (self.hardware.memory_bandwidth * self.engine.memory_share))
