"""The numbers that a model's weights are kept in, and what they change: memory, memory traffic and arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from rewired.hardware import Hardware

_SCALES = 2 / 128  # bytes of a 16-bit scale for each group of 128 weights, a weight


class Weights(NamedTuple):
    """Of the layers' projections; embedding and head stay in 16 bits."""

    name: str
    bytes: float  # of a number
    speed: float = 1.0  # of matrix products, over those of 16 bits


WEIGHTS = {
    each.name: each
    for each in (
        Weights("bf16", 2),
        Weights("fp8", 1, speed=2),  # activations, too
        Weights("int8", 1, speed=2),
        Weights("int4", 0.5 + _SCALES),  # activations stay in 16 bits, and so do products
    )
}
BF16 = WEIGHTS["bf16"]


def weights_on(sheet: Hardware, name: str) -> Weights:
    """Those of that name, as fast as this machine multiplies them. Raises ValueError for an unknown name."""
    if name not in WEIGHTS:
        raise ValueError(f"There are no weights '{name}': choose one of {', '.join(WEIGHTS)}.")
    is_slow = name == "fp8" and not sheet.computes_fp8
    return WEIGHTS[name]._replace(speed=1.0) if is_slow else WEIGHTS[name]
