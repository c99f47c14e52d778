"""An engine's all-reduce on a stream of its own: compute goes on beside it, and a wait waits.

Never run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rewired.serve.vllm.side_stream import SideSums

pytestmark = pytest.mark.gpu
LONG = 2_000_000_000  # cycles of a clock: about a second
wait = torch.ops._c10d_functional.wait_tensor


@pytest.fixture
def gpu(device: str) -> torch.device:
    if device == "cpu":
        pytest.skip("a CPU has no streams")
    return torch.device(device, torch.cuda.current_device())


def summing(cycles: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """An all-reduce that takes so long, of two ranks that hold the same."""

    def all_reduce(output: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(cycles)
        return 2 * output

    return all_reduce


def test_compute_goes_on_beside_a_sum(gpu: torch.device) -> None:
    """By the order of events: the product after the start is done while the sum is not."""
    side, output = SideSums(summing(LONG), gpu), torch.ones(64, 64, device=gpu)
    output @ output  # the library is loaded
    total = side.start(output)
    under_way = side.stream.record_event()
    product = output @ output
    torch.cuda.current_stream().record_event().synchronize()
    assert not under_way.query()
    landed = wait(total) + product
    assert torch.equal(landed, torch.full_like(landed, 2 + 64))


def test_sums_follow_one_another_and_whoever_joins(gpu: torch.device) -> None:
    side, output = SideSums(summing(LONG // 10), gpu), torch.ones(8, device=gpu)
    first, second = side.start(output), side.start(output)
    under_way = side.stream.record_event()
    side.join()
    torch.cuda.current_stream().record_event().synchronize()
    assert under_way.query()
    assert torch.equal(wait(first) + wait(second), 4 * output)


def test_in_a_cuda_graph(gpu: torch.device) -> None:
    side, output = SideSums(lambda output: 2 * output, gpu), torch.ones(64, 64, device=gpu)

    def step() -> torch.Tensor:
        total = side.start(output)
        product = output @ output
        return wait(total) + product

    step()  # outside first, as vLLM does
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        landed = step()
    output.fill_(2)
    graph.replay()
    assert torch.equal(landed, torch.full_like(landed, 4 + 4 * 64))
