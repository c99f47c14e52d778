"""Shards as bytes: what is rounded, and by how much at most."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from rewired.comm import packing
from rewired.comm.packing import BITS, Layout, Packing, Parts

LAYOUT = Layout((100, 3, 157, 7), (True, False, True, False))  # 257 numbers of matrices: two blocks and one number more
layouts = st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=5)


def there_and_back(flat: torch.Tensor, dtype: str, layout: Layout = LAYOUT) -> torch.Tensor:
    packing = Packing(dtype, layout)
    return layout.join(packing.unpack(packing.pack(layout.split(flat))))


@settings(max_examples=60, deadline=None)
@given(layouts, st.sampled_from(["int8", "int4", "bf16"]), st.integers(-12, 12), st.integers(0, 2**31))
def test_no_number_is_off_by_more_than_half_a_step_of_its_block(
    parts: list[tuple[int, bool]], dtype: str, magnitude: int, seed: int
) -> None:
    """Whatever the sizes are; what is no matrix is not off at all."""
    layout = Layout(*map(tuple, zip(*parts, strict=True)))
    numbers = sum(layout.sizes)
    flat = torch.randn(2, numbers, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    found = there_and_back(flat, dtype, layout)
    assert found.shape == flat.shape
    (blocks, others), (found_blocks, found_others) = layout.split(flat), layout.split(found)
    assert torch.equal(found_others, others)
    # a scale is a bfloat16: the largest number of a block may be off by its rounding, 1 in 512, instead
    bound = blocks.abs() * 2**-8
    if dtype in BITS:
        step = blocks.abs().amax(-1, keepdim=True) / (2 ** (BITS[dtype] - 1) - 1)
        bound = step * (0.5 * (1 + 2**-8) + 1e-5) + bound * (dtype == "int8")
    assert ((found_blocks - blocks).abs() <= bound).all()


@pytest.mark.parametrize(("dtype", "size"), [("int8", 3 * 130), ("int4", 3 * 66), ("bf16", 3 * 256)])
def test_bytes_of_a_shard(dtype: str, size: int) -> None:
    packed = Packing(dtype, LAYOUT).pack(LAYOUT.split(torch.randn(4, 267)))
    assert packed.dtype == torch.uint8 and packed.shape == (4, size + 10 * 4)


@pytest.mark.parametrize("dtype", ["int8", "int4", "bf16"])
def test_a_slice_of_bytes_may_begin_anywhere(dtype: str) -> None:
    packing, flat = Packing(dtype, LAYOUT), torch.randn(3, 267)
    packed = packing.pack(LAYOUT.split(flat))
    buffer = torch.zeros(3 * packed.shape[1] + 1, dtype=torch.uint8)
    buffer[1:] = packed.flatten()
    for row, one in zip(flat, buffer[1:].view(3, -1), strict=True):
        assert torch.equal(LAYOUT.join(packing.unpack(one)), there_and_back(row, dtype))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_zeros_stay_zeros_and_a_huge_value_spoils_its_block_only(dtype: str) -> None:
    flat = torch.zeros(256)
    flat[:128] = torch.linspace(-1, 1, 128)
    layout = Layout((256,), (True,))
    quiet = there_and_back(flat, dtype, layout)
    assert quiet[128:].eq(0).all()
    flat[200] = 3e38
    found = there_and_back(flat, dtype, layout)
    assert torch.equal(found[:128], quiet[:128])
    torch.testing.assert_close(found[200], flat[200], rtol=0.01, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", ["int8", "int4", "bf16"])
def test_what_is_not_finite_is_seen_where_it_was(dtype: str, bad: float) -> None:
    flat = torch.randn(267)
    flat[5] = bad
    found = there_and_back(flat, dtype)
    assert not found[5].isfinite() and found[150:].isfinite().all()
    assert dtype == "bf16" or not found[:100].isfinite().any()  # its block, as far as it is of the first matrix


def rotate(blocks: torch.Tensor) -> torch.Tensor:
    return blocks @ packing.hadamard(blocks.device)


def test_a_rotation_is_the_hadamard_matrix_and_its_own_inverse() -> None:
    blocks = torch.randn(5, 3, 128)
    expected = blocks.double() @ torch.from_numpy(hadamard(128) / 128**0.5).double()
    torch.testing.assert_close(rotate(blocks), expected.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(rotate(blocks)), blocks, rtol=0, atol=1e-5)


def test_rotated_an_outlier_costs_its_block_less() -> None:
    blocks = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    blocks[:, 7] = 100.0
    packing, nothing = Packing("int4", Layout((50 * 128,), (True,))), torch.zeros(0)

    def error(parts: torch.Tensor) -> float:
        return float((packing.unpack(packing.pack(Parts(parts, nothing))).blocks - parts).square().mean())

    assert error(rotate(blocks)) < 0.75 * error(blocks)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_rotation_hides_nothing(bad: float) -> None:
    blocks = torch.randn(2, 128)
    blocks[1, 3] = bad
    found = rotate(rotate(blocks))
    assert found[0].isfinite().all() and not found[1].isfinite().any()
