"""One start of four ranks for all that is tried on them: starting takes longer than each trial."""

from __future__ import annotations

from typing import Any

import pytest

from rewired.comm.nodes import Nodes
from rewired.ranks import run_on_ranks
from tests.adapt.conftest import _own_cache, dense, rows  # noqa: F401 - fixtures

from .slices import RANKS
from .test_gradients import divided, gradients, norms, not_finite, pipelined, repeated, resumed, scheduled
from .test_models import TALKING, TRAINED, frozen, traffic, trained
from .test_overlaps import order, pipeline, read_early
from .test_weights import differences, kept_in_16_bits, weights


@pytest.fixture(scope="session")
def found() -> list[dict[str, Any]]:
    """What every rank saw."""
    return run_on_ranks(on_ranks, RANKS)


def on_ranks() -> dict[str, Any]:
    nodes = {size: Nodes.of(size, "cpu") for size in (1, 2, 4)}
    return {
        "gradients": {size: gradients(nodes[size]) for size in nodes},
        "pipelined": {size: pipelined(nodes[size]) for size in nodes},
        "scheduled": scheduled(nodes[2]),
        "divided": {op: divided(nodes[2], op) for op in ("SUM", "PREMUL_SUM")},
        "not finite": {bad: not_finite(nodes[2], bad) for bad in (float("inf"), float("nan"))},
        "feedback": {on: repeated(nodes[2], on) for on in (False, True)},
        "resumed": resumed(nodes[2]),
        "norms": norms(nodes[2]),
        "weights": {size: weights(nodes[size]) for size in nodes},
        "in 16 bits": kept_in_16_bits(nodes[2]),
        "differences": {size: differences(nodes[size]) for size in (1, 2)},
        "bytes": {name: traffic(nodes[2], comm) for name, comm in TALKING.items()},
        "trained": {(name, size): trained(nodes[size], comm) for name, comm in TRAINED.items() for size in (1, 2)},
        "plain": trained(nodes[2], None),
        "at once": trained(nodes[2], TRAINED["slow-link"], at_once=True),
        "frozen": frozen(nodes[2]),
        "read early": read_early(nodes[2]),
        "pipeline": pipeline(nodes[2]),
        "order": {checkpoints: order(nodes[2], checkpoints) for checkpoints in (False, True)},
    }
