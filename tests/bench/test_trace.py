"""What a trace tells: of two ranks that really ran, by the order of what they did; and of a GPU, by a trace made up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from rewired.bench.trace import ATTENTION, MLP, RankTrace, read, traced
from rewired.ranks import run_on_ranks
from tests.rewired.sharded import load, saved
from tests.rewired.tiny import tokens

LAYERS = 6
LADDER: list[dict[str, Any]] = [{"layers": "0-", "preset": "ladder"}]


def trace_forward(folder: Path) -> None:
    model = load(folder, 2)

    def run() -> None:
        model(tokens())

    run()
    traced(run, folder / f"{distributed.get_rank()}.json.gz")


def ranks_of(wiring: list[dict[str, Any]], folder: Path) -> list[RankTrace]:
    run_on_ranks(trace_forward, 2, saved(wiring, folder))
    return [read(folder / f"{rank}.json.gz") for rank in range(2)]


def hidden(rank: RankTrace) -> int:
    """Behind how many all-reduces a matrix product ran: all on the thread of the model, so this is their order."""
    return sum(
        any(each.launched <= product.start and product.end <= wait.start for product in rank.products)
        for each, wait in zip(rank.all_reduces, rank.waits, strict=False)  # the logits' wait comes last
    )


@pytest.mark.parametrize(("wiring", "expected"), [([], 0), (LADDER, 2 * LAYERS - 1)], ids=["standard", "ladder"])
def test_matrix_products_run_behind_all_reduces_of_ladder_and_not_of_standard(
    wiring: list[dict[str, Any]], expected: int, tmp_path: Path
) -> None:
    for rank in ranks_of(wiring, tmp_path):
        assert hidden(rank) == expected
        assert [module.name for module in rank.modules] == [ATTENTION, MLP] * LAYERS
        by_modules = [each.module for each in rank.all_reduces if each.module]
        assert by_modules == [ATTENTION, MLP] * LAYERS
        assert all(each.launched <= each.start <= each.end for each in rank.all_reduces)


COMPUTE, NCCL = 7, 20  # streams
KERNELS = [
    # stream, beginning, duration, name
    (COMPUTE, 0, 40, "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn"),
    (NCCL, 40, 50, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    (COMPUTE, 42, 45, "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn"),
    (NCCL, 95, 30, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    (NCCL, 130, 9, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    (NCCL, 140, 8, "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(...)"),
]
MARKS = [(COMPUTE, 0, 40, ATTENTION), (COMPUTE, 42, 45, MLP), (NCCL, 40, 50, "nccl:all_reduce")]


def event(category: str, thread: int, start: float, duration: float, name: str) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": start, "dur": duration}


def test_kernels_that_communicate_are_told_from_those_that_compute(tmp_path: Path) -> None:
    """The CPU is ahead of the GPU: when it launches says nothing."""
    on_cpu = [event("cpu_op", 1, start, 1, "c10d::allreduce_") for start in (-30, -20)]
    on_cpu += [event("user_annotation", 1, -35, 3, ATTENTION), event("cpu_op", 1, -35, 2, "aten::mm")]
    on_gpu = [event("kernel", *kernel) for kernel in KERNELS] + [event("gpu_user_annotation", *mark) for mark in MARKS]
    file = tmp_path / "trace.json.gz"
    with gzip.open(file, "wt") as stream:
        json.dump({"traceEvents": [*on_gpu, *on_cpu, {"ph": "M", "name": "process_name"}]}, stream)
    rank = read(file)
    assert [(each.start, each.end, each.module) for each in rank.all_reduces] == [
        (40, 90, ATTENTION), (95, 125, MLP), (130, 139, MLP), (140, 148, MLP)
    ]  # fmt: skip
    assert [(each.start, each.end) for each in rank.products] == [(0, 40), (42, 87)]
    assert [(each.name, each.start, each.end) for each in rank.modules] == [(ATTENTION, 0, 40), (MLP, 42, 87)]
    assert rank.waits == []
