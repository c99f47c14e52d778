"""Gradients on four ranks, of one, two or four nodes: what arrives of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import ReduceOp, init_device_mesh
from torch.distributed.fsdp import fully_shard

from rewired.comm.communication import Communication
from rewired.comm.gradients import GradientScatter
from rewired.comm.nodes import Nodes
from rewired.comm.options import PRESETS, Comm
from rewired.comm.packing import Layout

from .slices import BF16, LAYOUT, NUMBERS, RANKS, rounded


def gradient(rank: int, step: int = 0) -> torch.Tensor:
    """[ranks, numbers]: the slice of every rank."""
    return torch.randn(RANKS, NUMBERS, generator=torch.Generator().manual_seed(100 * step + rank))


def reduced(scatter: GradientScatter, whole: torch.Tensor, op: Any = ReduceOp.AVG) -> torch.Tensor:
    own = torch.empty(NUMBERS)
    scatter(own, whole.flatten().clone(), distributed.group.WORLD, op)
    return own


KINDS = {"zero++": PRESETS["zero++"], "mixed": Comm(hadamard=False), "slow-link": Comm(), "bf16": BF16}


def gradients(nodes: Nodes) -> dict[str, Any]:
    whole = gradient(distributed.get_rank())
    return {name: reduced(GradientScatter(nodes, LAYOUT, comm), whole).numpy() for name, comm in KINDS.items()}


def reference(comm: Comm, ranks_per_node: int, receiver: int) -> torch.Tensor:
    """The mean that `receiver` gets: node by node in one quantisation, and what nodes send in another."""
    total = torch.zeros(NUMBERS)
    for first in range(0, RANKS, ranks_per_node):
        slices = [gradient(rank)[receiver] for rank in range(first, first + ranks_per_node)]
        if ranks_per_node > 1:
            slices = [rounded(one, comm.gradients_in_node) for one in slices]
        of_node = torch.stack(slices).sum(0)
        total += of_node if ranks_per_node == RANKS else rounded(of_node, comm.gradients)
    return total / RANKS


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["zero++", "mixed", "bf16"])
def test_each_rank_gets_the_mean_of_its_own_slice(name: str, size: int, found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        arrived = torch.from_numpy(one["gradients"][size][name])
        torch.testing.assert_close(arrived, reference(KINDS[name], size, rank), rtol=1e-6, atol=1e-7)


def test_rotated_gradients_come_back_turned(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        exact = torch.stack([gradient(other)[rank] for other in range(RANKS)]).mean(0)
        errors = {name: float((torch.from_numpy(one["gradients"][2][name]) - exact).norm()) for name in KINDS}
        assert errors["slow-link"] < 0.15 * float(exact.norm())  # of 4 bits: half a step is 1/14 of the largest
        assert errors["bf16"] < errors["slow-link"] < errors["zero++"]


PIPELINES = (1, 2, 3, 7)  # of three blocks


def pipelined(nodes: Nodes) -> dict[int, list[Any]]:
    """What arrives in three steps, with error feedback, in so many chunks."""
    arrived = {}
    for chunks in PIPELINES:
        scatter = GradientScatter(nodes, LAYOUT, Comm(error_feedback=True, pipeline=chunks))
        arrived[chunks] = [reduced(scatter, gradient(distributed.get_rank(), step)).numpy() for step in range(3)]
    return arrived


@pytest.mark.parametrize("size", [1, 2, 4])
def test_in_chunks_the_same_arrives_bit_for_bit(size: int, found: list[dict[str, Any]]) -> None:
    for one in found:
        whole, *others = one["pipelined"][size].values()
        for other in others:
            assert all((arrived == expected).all() for arrived, expected in zip(other, whole, strict=True))


SCHEDULE = Comm(gradients={0: "int4", 0.5: "bf16"}, gradients_in_node={0: "int8", 0.25: "int4", 0.5: "bf16"})


def scheduled(nodes: Nodes) -> list[Any]:
    """What arrives at the beginning of a training, in the middle and at the end."""
    layer = nn.Linear(16, 16)
    fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    communication, arrived = Communication(layer, SCHEDULE, nodes), []
    [scatter] = communication.gradients.values()
    scatter.layout = LAYOUT
    for done in (0.0, 0.25, 0.49, 0.5, 1.0):
        communication.at(done)
        arrived.append(reduced(scatter, gradient(distributed.get_rank())).numpy())
    return arrived


def test_how_gradients_travel_changes_where_the_schedule_says(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        exact = torch.stack([gradient(other)[rank] for other in range(RANKS)]).mean(0)
        int8, int4, still_int4, bf16, last = map(torch.from_numpy, one["scheduled"])
        assert torch.equal(int4, still_int4) and torch.equal(bf16, last)
        assert torch.equal(int8, torch.from_numpy(one["gradients"][2]["slow-link"]))
        errors = [float((arrived - exact).norm()) for arrived in (bf16, int8, int4)]
        assert errors == sorted(errors) and 10 * errors[0] < errors[1]


def divided(nodes: Nodes, name: str) -> Any:
    op = getattr(ReduceOp, name)
    scatter = GradientScatter(nodes, LAYOUT, BF16)
    return reduced(scatter, gradient(distributed.get_rank()), op if name == "SUM" else op(0.125)).numpy()


def test_the_sum_is_divided_as_fsdp_asks(found: list[dict[str, Any]]) -> None:
    for one in found:
        mean = torch.from_numpy(one["gradients"][2]["bf16"])
        torch.testing.assert_close(torch.from_numpy(one["divided"]["SUM"]), 4 * mean)
        torch.testing.assert_close(torch.from_numpy(one["divided"]["PREMUL_SUM"]), mean / 2)


def not_finite(nodes: Nodes, bad: float) -> dict[str, Any]:
    whole = gradient(distributed.get_rank())
    if distributed.get_rank() == 1:
        whole[2, 200] = bad
    return {name: reduced(GradientScatter(nodes, LAYOUT, comm), whole).numpy() for name, comm in KINDS.items()}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_one_rank_s_overflow_is_seen_by_whom_it_concerns(bad: float, found: list[dict[str, Any]]) -> None:
    seen = {str(key): value for key, value in found[2]["not finite"].items()}[str(bad)]
    for name in KINDS:
        arrived = torch.from_numpy(seen[name])
        assert not arrived[200].isfinite() and arrived[:133].isfinite().all(), name
    for rank in (0, 1, 3):
        for each in found[rank]["not finite"].values():
            assert all(torch.from_numpy(arrived).isfinite().all() for arrived in each.values())


STEPS = 40
FEEDBACK = {on: Comm(error_feedback=on) for on in (False, True)}


def repeated(nodes: Nodes, with_feedback: bool) -> Any:
    """The mean of what arrives where the same gradient is sent again and again."""
    scatter, whole = GradientScatter(nodes, LAYOUT, FEEDBACK[with_feedback]), gradient(distributed.get_rank())
    return torch.stack([reduced(scatter, whole) for _ in range(STEPS)]).mean(0).numpy()


def test_with_error_feedback_nothing_is_lost_for_ever(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        exact = torch.stack([gradient(other)[rank] for other in range(RANKS)]).mean(0)
        lost = {on: float((torch.from_numpy(one["feedback"][on]) - exact).norm()) for on in FEEDBACK}
        assert lost[True] < 0.15 * lost[False]


def norms(nodes: Nodes) -> Any:
    """What arrives of a layer of which no matrix is trained."""
    whole, own = gradient(distributed.get_rank())[:, :5].flatten(), torch.empty(5)
    scatter = GradientScatter(nodes, Layout((5,), (False,)), FEEDBACK[True])
    scatter(own, whole, distributed.group.WORLD, ReduceOp.AVG)
    return own.numpy()


def test_where_no_matrix_is_trained_nothing_is_rounded(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        exact = torch.stack([gradient(other)[rank, :5] for other in range(RANKS)]).mean(0)
        torch.testing.assert_close(torch.from_numpy(one["norms"]), exact)


def resumed(nodes: Nodes) -> list[Any]:
    """What arrives in steps 3 and 4 of one training, and of one that goes on from the state after step 2."""
    layer = nn.Linear(16, 16)
    fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    communications = [Communication(layer, FEEDBACK[True], nodes) for _ in range(2)]
    whole, later = (one.gradients[""] for one in communications)
    arrived = []
    for step in range(4):
        if step == 2:
            communications[1].load_state_dict(communications[0].state_dict())
        shard = gradient(distributed.get_rank(), step)[:, : sum(whole.layout.sizes)].contiguous()
        own = [torch.empty(shard.shape[1]) for _ in range(2)]
        whole(own[0], shard.flatten(), distributed.group.WORLD, ReduceOp.AVG)
        if step >= 2:
            later(own[1], shard.flatten(), distributed.group.WORLD, ReduceOp.AVG)
            arrived.append([one.numpy() for one in own])
    return arrived


def test_what_error_feedback_remembers_is_all_that_it_needs(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert all((uninterrupted == resumed).all() for uninterrupted, resumed in one["resumed"])
