"""AxoNN's model: the bandwidths of equation 10, ring times step by step, and grids that are ranked."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewired import hardware
from rewired.checkpoint.named_shapes import named_shapes
from rewired.plan.grids import all_gather, all_reduce, bandwidths, plan_grids, price, reduce_scatter

SHAPE, H100 = named_shapes()["llama-3.1-8b"], hardware.load("h100")


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ((8, 1, 1, 1), [100, None, None, None]),
        ((2, 4, 1, 1), [200, 50, None, None]),
        ((2, 2, 2, 1), [200, 200, 25, 25]),
        ((8, 2, 1, 1), [None, 25, None, None]),
    ],
)
def test_equation_10(grid: tuple[int, ...], expected: list[float | None]) -> None:
    rates = bandwidths(grid, gpus_per_node=4, within=200, between=100)
    assert [rate for rate, known in zip(rates, expected, strict=True) if known is not None] == [
        known for known in expected if known is not None
    ]


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4), st.sampled_from([1, 4, 8]))
def test_equation_10_written_anew(grid: list[int], node: int) -> None:
    for i, rate in enumerate(bandwidths(grid, node, 200, 100)):
        inside = math.prod(grid[: i + 1]) <= node
        assert rate == (200 if inside else 100 / min(node, math.prod(grid[:i])))


@given(st.integers(1, 32), st.floats(1, 1e9))
def test_rings_step_by_step(gpus: int, size: float) -> None:
    """In each of N - 1 steps every GPU sends a shard: its own, or an N-th of its sums."""
    assert all_gather(gpus, size, 1e9) == pytest.approx(sum(size / 1e9 for _ in range(gpus - 1)))
    assert reduce_scatter(gpus, size, 1e9) == pytest.approx(sum(size / gpus / 1e9 for _ in range(gpus - 1)))
    scattered, gathered = reduce_scatter(gpus, size, 1e9), all_gather(gpus, size / gpus, 1e9)
    assert all_reduce(gpus, size, 1e9) == pytest.approx(scattered + gathered)


def test_every_grid_is_ranked_or_left_out_with_its_reason() -> None:
    plan = plan_grids(SHAPE, H100, 4, 8, batch=32, tokens=2048)
    grids = {(grid.x, grid.y, grid.fsdp, grid.replicate) for grid in plan.grids}
    divisors = [1, 2, 4, 8, 16, 32]
    assert len(grids) + len(plan.left_out) == sum(math.prod(four) == 32 for four in product(divisors, repeat=4))
    assert all(math.prod(grid) == 32 for grid in grids)
    assert [grid.communication for grid in plan.grids] == sorted(grid.communication for grid in plan.grids)
    assert any("does not divide num_key_value_heads 8" in reason for reason in plan.left_out)
    assert any("needs 129 GB a GPU of 80" in reason for reason in plan.left_out)


def test_a_grid_by_hand() -> None:
    """tp 2 and fsdp 2 within a node of 4, replicas on two nodes, whose links four rings share."""
    sheet = H100
    grid = price(SHAPE, sheet, 4, (2, 1, 2, 2), batch=8, tokens=100)
    layer = 2 * 4096 * (32 + 8) * 128 + 3 * 4096 * 14336
    inside, across = 450e9, 50e9 * 4 / 4
    activations = 2 * 4096 * 8 * 100 / 4
    assert grid.tensor == pytest.approx(32 * 6 * 2 * 1 / 2 * activations / inside)
    assert grid.weights == pytest.approx(32 * (2 * 1 * 2 * layer / 4 / inside + 1 / 2 * 2 * layer / 2 / inside))
    assert grid.gradients == pytest.approx(32 * 2 * 1 / 2 * 2 * layer / 4 / across)


def test_rows_and_columns_by_hand() -> None:
    """x 2 within a node of 4, y 4 over two of them: equations 6 and 7, for readers and for writers, whose X is Y."""
    grid = price(SHAPE, H100, 4, (2, 4, 1, 1), batch=8, tokens=100)
    rows, inside, across = 2 * 8 * 100, 450e9, 50e9 * 4 / 2
    of_x = 6 * 2 * 1 / 2 * rows * 4096 / 4 / inside
    read, written = (32 + 2 * 8) * 128 + 2 * 14336, 32 * 128 + 14336
    of_y = 2 * 3 / 4 * rows * (2 * read + written) / 2 / across
    assert grid.tensor == pytest.approx(32 * (of_x + of_y))
    assert [(term.equation, term.gpus, term.bandwidth) for term in grid.terms[2:4]] == [(6, 2, inside), (7, 4, across)]


def test_the_launch_line_names_what_is_shared() -> None:
    grid = price(SHAPE, H100, 8, (2, 1, 16, 1), batch=32, tokens=100)
    expected = "torchrun --nnodes 4 --nproc-per-node 8 -m rewired.adapt RECIPE --tp_size 2 --fsdp_size 16"
    assert grid.command(4, 8) == expected
    columns = price(SHAPE, H100, 8, (2, 4, 4, 1), batch=32, tokens=100)
    assert columns.command(4, 8).endswith("--tp_size 2x4 --fsdp_size 4")


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="No grid of 1x8 H100 SXM fits"):
        plan_grids(named_shapes()["llama-3.1-405b"], H100, 1, 8, batch=8, tokens=2048)
