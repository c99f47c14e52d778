"""CAAT-Net's law (appendix C): the time that reducing a share p of the channels saves, and the p below which none is.

h is the hidden size, s the sequence length, r the tensor-parallel degree, and C the machine's FLOP/s over the numbers
that it all-reduces a second.
"""

from __future__ import annotations

from .machine import Machine

_LARGE = 256 * 1024 * 1024  # bytes of a message at which an all-reduce has its full bandwidth


def time_saved(hidden: int, sequence: int, capacity: float, tp: int, share: float) -> float:
    """Equation 32: (T(1) - T(p)) / T(1)."""
    return (1 - share) / (1 + _work(hidden, sequence) / (capacity * tp))


def best_share(hidden: int, sequence: int, capacity: float, tp: int) -> float:
    """Equation 33: p*, at which all-reduces take as long as the compute that could hide them."""
    return min(_work(hidden, sequence) / (capacity * tp), 1.0)


def capacity(machine: Machine) -> float:
    """C of a machine of several GPUs, for messages large enough for the full bandwidth."""
    numbers = _LARGE / 2 / machine.all_reduce.seconds(_LARGE, machine.tp)
    return machine.hardware.flops * machine.engine.flops_share / numbers


def _work(hidden: int, sequence: int) -> float:
    return 12 * hidden + 2 * sequence
