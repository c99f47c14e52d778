"""Models under FSDP2 on four ranks: in how many bytes they talk, and what they learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rewired.comm.communication import Communication
from rewired.comm.nodes import Nodes
from rewired.comm.options import PRESETS, Comm

from .slices import BF16, RANKS
from .traffic import Traffic

WIDTH = 256
WEIGHTS = 2 * WIDTH * WIDTH
DIFFERENCES = Comm("int4-difference")
TALKING = {"plain": None, "differences": DIFFERENCES} | PRESETS


def traffic(nodes: Nodes, comm: Comm | None) -> dict[str, tuple[int, int]]:
    """Bytes between and within nodes, of the passes of a step, in 16 bits where nothing is quantised."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if comm is None else MixedPrecisionPolicy()
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if comm is not None:
        communication = Communication(model, comm, nodes)
        model(torch.randn(3, WIDTH)).sum().backward()  # weights are sent whole before differences of them
        communication.weights_changed()
    passes = {}
    with Traffic(nodes.ranks) as counted:
        loss = model(torch.randn(3, WIDTH)).square().mean()
        passes["forward"] = counted.take()
        loss.backward()
        passes["backward"] = counted.take()
    return passes


def test_bytes_between_nodes_are_those_of_the_paper_s_table(found: list[dict[str, Any]]) -> None:
    """Table 1 of ZeRO++: M, M and M become M / 2, 0 and M / 4, and the scales of blocks come on top."""
    for one in found:
        between = {name: [sizes[0] for sizes in passes.values()] for name, passes in one["bytes"].items()}
        m = 2 * WEIGHTS
        assert between["plain"] == [m, 2 * m]
        assert between["zero++"] == between["slow-link"] == [m // 2 * 130 // 128, m // 4 * 66 // 64]
        assert between["differences"] == [m // 4 * 66 // 64] * 2


def test_bytes_within_nodes(found: list[dict[str, Any]]) -> None:
    """What a node's ranks have between them they gather in 8 bits, or backward in the 16 bits that they keep."""
    for one in found:
        within = {name: [sizes[1] for sizes in passes.values()] for name, passes in one["bytes"].items()}
        int8, int4 = WEIGHTS * 130 // 128, WEIGHTS // 2 * 66 // 64
        assert within["zero++"] == [int8, 2 * WEIGHTS + int4]
        assert within["slow-link"] == [int8, int8 + int8]
        assert within["differences"] == [2 * WEIGHTS, 2 * WEIGHTS + int8]


TRAINED = {
    "bf16": BF16,
    "no secondary shard": Comm("bf16", "bf16", "bf16", secondary_shard="none", hadamard=False),
    "slow-link": PRESETS["slow-link"],
    "zero++": PRESETS["zero++"],
    "differences": DIFFERENCES,
}


def trained(nodes: Nodes, comm: Comm | None, at_once: bool = False) -> dict[str, Any]:
    """Losses of a model whose sizes divide by nothing, and its weights, after steps with two batches each."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 50), nn.GELU(), nn.Linear(50, 33)) for _ in range(2)],
        nn.Linear(33, 3),  # fewer rows than ranks
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if comm is not None:
        communication = Communication(model, comm, nodes)
        communication.follow(optimizer)
        for scatter in communication.gradients.values() if at_once else ():
            scatter.read_at_once = lambda _: True
    generator, losses = torch.Generator().manual_seed(distributed.get_rank()), []
    for _ in range(4):
        for _ in range(2):
            x = torch.randn(8, 33, generator=generator)
            loss = (model(x) - x[:, :3]).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": [weight.full_tensor().detach().numpy() for weight in model.parameters()]}


def test_a_secondary_shard_is_never_older_than_the_weights(found: list[dict[str, Any]]) -> None:
    """Bit for bit: DeepSpeed's stopped converging where a gather read what a copy had not written yet."""
    for one in found:
        for size in (1, 2):
            kept, gathered = (one["trained"][name, size] for name in ("bf16", "no secondary shard"))
            assert kept["losses"] == gathered["losses"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("name", "tolerance"), [("bf16", 0.002), ("slow-link", 0.02), ("zero++", 0.04), ("differences", 0.02)]
)
def test_a_model_of_any_size_learns_what_it_does_without(
    name: str, tolerance: float, size: int, found: list[dict[str, Any]]
) -> None:
    for one in found:
        losses = [run["losses"] for run in (one["trained"][name, size], one["plain"])]
        torch.testing.assert_close(*map(torch.tensor, losses), rtol=tolerance, atol=0)


def test_late_gradients_are_those_that_are_complete_at_once(found: list[dict[str, Any]]) -> None:
    for one in found:
        late, at_once = one["trained"]["slow-link", 2], one["at once"]
        assert late["losses"] == at_once["losses"]
        assert all((own == other).all() for own, other in zip(late["weights"], at_once["weights"], strict=True))


def frozen(nodes: Nodes) -> dict[str, Any]:
    """Bytes between nodes in each of two steps of a model of which one layer is trained, and its outputs."""
    counts = {}
    for gather in ("once", "each"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
        expected = model[0].weight.detach().clone()
        for layer in (*model, model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
        model[0].weight = nn.Parameter(model[0].weight.detach(), requires_grad=False)  # as loading puts it there
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.2)
        Communication(model, Comm(gather_frozen=gather), nodes).follow(optimizer)
        counts[gather] = []
        for _ in range(2):
            with Traffic(nodes.ranks) as counted:
                model(torch.randn(3, WIDTH)).square().mean().backward()
            counts[gather].append(counted.take()[0])
            optimizer.step()
            optimizer.zero_grad()
        model[0].unshard()
        counts[gather, "is exact"] = torch.equal(model[0].weight, expected)
    return counts


def test_frozen_weights_cross_nodes_once_and_unrounded(found: list[dict[str, Any]]) -> None:
    """Otherwise twice a step: FSDP2 prefetches in backward what was used last before, needed or not."""
    trained, whole = WIDTH * WIDTH * 130 // 128 + WIDTH * WIDTH // 2 * 66 // 64, 4 * WIDTH * WIDTH
    for one in found:
        assert one["frozen"]["once"] == [trained + whole, trained]
        assert one["frozen"]["each"] == [trained + 2 * whole] * 2
        assert one["frozen"]["once", "is exact"] and one["frozen"]["each", "is exact"]
