"""Engines: how far one is from the machine's peaks, and what it does beside the model. Read from engines.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Engine:
    """Fitted parameters, and the habits that cost time. Seconds and bytes; shares are of a data sheet's peak."""

    flops_share: float  # of large matrix products
    memory_share: float  # of reading weights and cache
    attention_overhead: float  # a module, however little it has to do: launches, norms, rotary embedding
    mlp_overhead: float
    slack: float  # an all-reduce inside a model takes this much longer than measured alone
    network_step: float  # an all-reduce's way from node to node
    hide: float  # share of a collective, latency aside, that runs behind compute: its kernel takes some processors,
    slow_hide: float  # fewer of them where links are slow
    ring_base: float = 0.0  # of an all-reduce within a node that was not measured
    ring_step: float = 0.0
    ring_share: float = 1.0  # of the link's bandwidth
    fused_saving: float = 0.0  # of `parallel`, where an engine fuses attention and MLP
    static_cache: int = 0  # positions that every query attends to, however few are filled
    cache_passes: float = 0.0  # of every query head over its cache; 0: it is read once, for all heads that share it
    score_passes: float = 0.0  # over the matrix of attention scores, or as much arithmetic; 0: as in flash attention
    shards_head: bool = True
    logits_of_prompt: bool = False  # of all its positions, not of the last one


@cache
def load(name: str) -> Engine:
    """`serving` stands for vLLM and TensorRT-LLM."""
    return Engine(**tomllib.loads((files("rewired.plan") / "engines.toml").read_text("utf-8"))[name])
