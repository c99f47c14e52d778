"""CAAT-Net's law, against the paper's equations and the numbers of issue 36."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewired.plan.machine import best_share, capacity, serving_machine


@pytest.mark.parametrize(("tp", "best"), [(8, 1.0), (16, 0.832)])
def test_known_values(tp: int, best: float) -> None:
    assert best_share(4096, 2048, 4000, tp) == pytest.approx(best, abs=5e-4)


@given(st.integers(64, 20_000), st.integers(1, 10_000), st.floats(10, 1e5), st.sampled_from([2, 4, 8, 16]))
def test_equation_33_from_30_and_31(hidden: int, sequence: int, ratio: float, tp: int) -> None:
    """Compute in FLOP, communication in numbers times the machine's FLOP a number."""
    compute = (24 * sequence * hidden**2 + 4 * sequence**2 * hidden) / tp
    best = best_share(hidden, sequence, ratio, tp)
    assert best == 1 or compute == pytest.approx(ratio * 2 * sequence * hidden * best)


def test_slow_links_have_a_larger_ratio() -> None:
    assert capacity(serving_machine("l40s", "nccl", 4)) > capacity(serving_machine("h100", "nccl", 4))
