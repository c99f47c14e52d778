"""Block Hadamard matrices, and where their blocks end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewired.model.payload import GROUP, Section
from rewired.model.quantisation import quantised_sum
from rewired.model.wiring import Wiring
from rewired.rotate.hadamard import block_hadamard, section_widths


@given(widths=st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_it_is_orthonormal_and_no_section_reaches_into_another(widths: list[int]) -> None:
    matrix, start = block_hadamard(widths), 0
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(sum(widths), dtype=torch.float64))
    for width in widths:
        assert matrix[start : start + width].square().sum() == pytest.approx(
            float(matrix[start : start + width, start : start + width].square().sum())
        )
        start += width


def test_a_block_is_a_group_and_what_remains_is_powers_of_two() -> None:
    """Every channel of a block is spread over all of it."""
    matrix, start = block_hadamard([2 * GROUP + 44]), 0
    for size in (GROUP, GROUP, 32, 8, 4):
        block = matrix[start : start + size, start : start + size]
        torch.testing.assert_close(block.abs(), torch.full_like(block, size**-0.5))
        start += size
    assert start == len(matrix)


@pytest.mark.parametrize(
    ("regions", "widths"),
    [
        ([], [576]),
        ([{"layers": "0-4", "preset": "standard", "payload": "int4"}], [576]),
        ([{"layers": "0-4", "preset": "partial", "shared_fraction": 0.25}], [144, 432]),
        (
            [
                {"layers": "0-2", "preset": "standard", "payload": {8: 0.1, 4: 0.4, 0: 0.5}},
                {"layers": "2-4", "preset": "partial", "shared_fraction": 0.25, "payload": "int4"},
            ],
            [57, 87, 144, 288],
        ),
    ],
)
def test_sections_are_cut_where_a_reduction_changes_its_bits(regions: list[dict[str, Any]], widths: list[int]) -> None:
    assert section_widths(Wiring.from_json(regions, 4, 576)) == widths


def test_a_group_with_one_large_channel_is_quantised_better() -> None:
    parts = torch.randn(3, 1, 50, GROUP, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts[..., 5] *= 30
    matrix, sections, total = block_hadamard([GROUP]), (Section(4, 4, GROUP),), parts.sum(0)
    plain = (quantised_sum(parts, sections).total - total).square().mean()
    rotated = (quantised_sum(parts @ matrix, sections).total @ matrix.T - total).square().mean()
    assert rotated < plain / 4
