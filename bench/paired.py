"""Timing of two functions in turns, so that what slows the machine down slows both: only their ratio is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from torch import distributed
from transformers import DynamicCache

Pairs = list[tuple[float, float]]  # stock's seconds, and those of the model beside it


def interleaved(stock: Callable[[], None], other: Callable[[], None], pairs: int) -> Pairs:
    """The seconds of both, run A B, B A, A B, ... after a warm-up of each."""
    for run in (stock, other, stock, other):
        run()
    times = []
    for pair in range(pairs):
        if pair % 2:
            others, stocks = seconds(other), seconds(stock)
        else:
            stocks, others = seconds(stock), seconds(other)
        times.append((stocks, others))
    return times


def seconds(run: Callable[[], None]) -> float:
    """Wall time of `run`; ranks, where there are several, start together."""
    if distributed.is_initialized():
        distributed.barrier()
    settle()
    start = time.perf_counter()
    run()
    settle()
    return time.perf_counter() - start


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speed(pairs: Pairs) -> str:
    """The median of the pairs' ratios, with the quartiles."""
    low, middle, high = quantiles(ratios(pairs), n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def ratios(pairs: Pairs) -> list[float]:
    return [stock / other for stock, other in pairs]


def milliseconds(pairs: Pairs) -> str:
    """The median of stock's times, and that of the other's."""
    return ", ".join(f"{1e3 * median(times):.0f}" for times in zip(*pairs, strict=True))


def prefill_run(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model(tokens, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

    return run


def decode_run(model: Any, tokens: torch.Tensor, steps: int) -> Callable[[], None]:
    """Decodes `steps` tokens after the prompt, and takes them out of the cache again."""
    cache = DynamicCache(config=model.config)
    model(tokens, past_key_values=cache, logits_to_keep=1)

    def run() -> None:
        for _ in range(steps):
            model(tokens[:, :1], past_key_values=cache)
        cache.crop(-steps)

    return run
