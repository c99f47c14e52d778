"""Compute times of a layer's modules on one rank, by the roofline: as slow as its arithmetic or its memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

from rewired.checkpoint.llama import LlamaShape

from .engine import Engine
from .hardware import Hardware
from .shapes import attention_weights, head_weights, mlp_weights

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

    shape: LlamaShape
    hardware: Hardware
    engine: Engine
    tp: int

    def attention(self, step: Step) -> float:
        return (
            self.products(step.rows, attention_weights(self.shape) / self.tp)
            + self.scores(step)
            + self._stream(step.rows)
            + self.engine.attention_overhead
        )

    def mlp(self, step: Step) -> float:
        activations = 3 * step.rows * self.shape.intermediate_size / self.tp * _ITEM
        return (
            self.products(step.rows, mlp_weights(self.shape) / self.tp)
            + self._roofline(0, activations)
            + self._stream(step.rows)
            + self.engine.mlp_overhead
        )

    def head(self, step: Step) -> float:
        """The logits: of the last position, or of all where the engine computes them all."""
        weights = head_weights(self.shape) / (self.tp if self.engine.shards_head else 1)
        return self.products(step.rows if self.engine.logits_of_prompt else step.sequences, weights)

    def quantising(self, step: Step) -> float:
        """What a payload's packing and unpacking take, where one kernel does each; on one rank nothing is packed."""
        passes = self._roofline(0, _QUANTISING_PASSES * step.rows * self.shape.hidden_size * _ITEM)
        return passes + _QUANTISING_OVERHEAD if self.tp > 1 else 0.0

    def products(self, rows: int, weights: float) -> float:
        """`rows` times matrices of `weights` numbers in all."""
        return self._roofline(2 * rows * weights, _ITEM * weights)

    def scores(self, step: Step) -> float:
        """Queries against the cache. Flash attention skips the half of a prompt that is masked."""
        engine, shape = self.engine, self.shape
        positions = max(engine.static_cache, step.context)
        heads = shape.num_attention_heads / self.tp
        kv_heads = max(1.0, shape.num_key_value_heads / self.tp)
        attended = positions if engine.score_passes else positions - (step.new - 1) / 2
        cache = 2 * step.sequences * positions * shape.head_dim * _ITEM * (kv_heads + heads * engine.cache_passes)
        matrix = step.rows * heads * positions * _ITEM * engine.score_passes
        return self._roofline(4 * step.rows * attended * heads * shape.head_dim, cache + matrix)

    def _stream(self, rows: int) -> float:
        return self._roofline(0, _STREAM_PASSES * rows * self.shape.hidden_size * _ITEM)

    def _roofline(self, flops: float, size: float) -> float:
        arithmetic = flops / (self.hardware.flops * self.engine.flops_share)
        return max(arithmetic, size / (self.hardware.memory_bandwidth * self.engine.memory_share))
