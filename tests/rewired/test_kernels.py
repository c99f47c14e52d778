"""A payload's kernels: on any ranks the sum of one process, and compiled, here by Inductor for a CPU, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from rewired.model import kernels
from rewired.model.payload import FORMATS, Section, Sections
from rewired.model.quantisation import QuantisedSum, quantised_sum
from rewired.model.quantised_reduction import _add_up, _pack, _unpack

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ONE, SEVERAL = (Section(8, 8, 100),), (Section(8, 8, 100), Section(6, 6, 70), Section(4, 8, 200), Section(4, 4, 30))


def awkward_parts(dtype: torch.dtype, sections: Sections, tokens: int = 5, shards: int = 4) -> torch.Tensor:
    """[r, tokens, C], with tiny and huge numbers, a group of zeros, inf and NaN."""
    channels = sum(section.channels for section in sections)
    parts = torch.randn(shards, tokens, channels, generator=torch.Generator().manual_seed(1))
    parts *= torch.logspace(-6, 4, tokens)[:, None]
    parts[..., :64] *= torch.arange(tokens)[:, None] % 2
    parts[0, 0, 3] = 3e38 if dtype != torch.float16 else 6e4
    parts[1, -1, 70], parts[2, tokens // 2, -1] = float("inf"), float("nan")
    return parts.to(dtype)


def on_ranks(parts: torch.Tensor, sections: Sections, ranks: int) -> QuantisedSum:
    """What ranks compute that hold `parts`, one after the other, without sending anything."""
    sent, left = zip(*(_pack(own, sections=sections, ranks=ranks) for own in parts.chunk(ranks)), strict=True)
    left_of_sum, own = torch.empty_like(parts), []
    for rank, into in enumerate(left_of_sum.chunk(ranks)):
        received = torch.stack([each[rank] for each in sent]).flatten(0, 1)
        own.append(_add_up(received, into, sections=sections, ranks=ranks, rank=rank))
    total = torch.empty_like(parts[:1])
    _unpack(torch.cat(own), total, sections=sections)
    return QuantisedSum(total[0], torch.cat(left), left_of_sum)


def assert_same(found: QuantisedSum, expected: QuantisedSum) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


sections_of_any_kind = st.lists(
    st.builds(Section, st.sampled_from(sorted(FORMATS)), st.sampled_from(sorted(FORMATS)), st.integers(1, 300)),
    min_size=1,
    max_size=3,
).map(tuple)


@settings(max_examples=60)
@given(sections_of_any_kind, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from(DTYPES))
def test_ranks_compute_bit_for_bit_what_one_process_does(
    sections: Sections, ranks: int, held: int, tokens: int, dtype: torch.dtype
) -> None:
    channels, shards = sum(section.channels for section in sections), ranks * held
    parts = torch.randn(shards, tokens, channels, generator=torch.Generator().manual_seed(channels)).to(dtype)
    parts[0, 0, 0] = float("inf")
    assert_same(on_ranks(parts, sections, ranks), quantised_sum(parts, sections))


@contextmanager
def compiling() -> Iterator[Callable[[], int]]:
    """While it lasts, a CPU runs kernels as a GPU does; gives the number of graphs that were compiled."""
    torch.compiler.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_DEVICES", {"cpu"})
        yield lambda: counters["stats"]["unique_graphs"]
    torch.compiler.reset()


def one_process(parts: torch.Tensor, sections: Sections) -> QuantisedSum:
    return quantised_sum(parts, sections)


def two_ranks(parts: torch.Tensor, sections: Sections) -> QuantisedSum:
    return on_ranks(parts, sections, 2)


@pytest.mark.parametrize(
    ("run", "sections", "dtype"),
    [
        pytest.param(
            run,
            sections,
            dtype,
            marks=() if (run, sections, dtype) == (one_process, ONE, torch.bfloat16) else pytest.mark.slow,
        )
        for run in (one_process, two_ranks)
        for sections in (ONE, SEVERAL)
        for dtype in DTYPES
    ],
)
def test_compiled_they_give_the_bits_of_eager_mode(
    run: Callable[..., QuantisedSum], sections: Sections, dtype: torch.dtype
) -> None:
    """Inductor's own roundings are others: it leaves out that of scales to 16 bits."""
    parts = awkward_parts(dtype, sections)
    expected = run(parts, sections)
    with compiling() as graphs:
        assert_same(run(parts, sections), expected)
        assert graphs() > 0


@pytest.mark.parametrize("run", [one_process, two_ranks])
def test_each_is_one_graph(run: Callable[..., QuantisedSum]) -> None:
    """Where Dynamo breaks one, all that follows goes through memory more often, and nothing says so."""
    with compiling(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
        patch.setattr(kernels, "_compiled", kernels._compiled.__wrapped__)
        run(awkward_parts(torch.bfloat16, SEVERAL), SEVERAL)


@pytest.mark.slow
def test_they_are_compiled_for_one_token_and_for_any_other_number() -> None:
    """A decode and prefills of whatever length; and again for other sections, and as often as that takes."""
    with compiling() as graphs:
        for sections in ((Section(bits, 8, channels),) for bits in FORMATS for channels in (80, 100, 128)):
            before = graphs()
            for tokens in (7, 1, 300, 2, 1, 64):
                parts = awkward_parts(torch.bfloat16, sections, tokens)
                with torch.set_grad_enabled(tokens > 2):
                    assert quantised_sum(parts, sections).total.shape == parts.shape[1:]
            assert graphs() - before == 2
