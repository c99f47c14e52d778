"""Weights and gradients on four ranks, of one, two or four nodes: what arrives, in how many bytes, and how often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import ReduceOp, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from rewired.adapt.comm.communication import Communication
from rewired.adapt.comm.gradients import GradientScatter
from rewired.adapt.comm.nodes import Nodes
from rewired.adapt.comm.packing import Layout, Packing
from rewired.adapt.comm.weights import WeightGather
from rewired.adapt.recipe.comm import PRESETS, Comm
from rewired.ranks import run_on_ranks

from .traffic import Traffic

pytestmark = pytest.mark.xdist_group("ranks")

RANKS = 4
LAYOUT = Layout((5, 300, 40), (False, True, True))  # 2 blocks and 84 numbers more
NUMBERS = 345
BF16 = Comm("bf16", "bf16", "bf16", hadamard=False)
BITS = {"int4": 4, "int8": 8}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every rank saw of all that is tried here: starting ranks takes longer."""
    return run_on_ranks(on_ranks, RANKS)


def on_ranks() -> dict[str, Any]:
    nodes = {size: Nodes.of(size, "cpu") for size in (1, 2, 4)}
    return {
        "gradients": {size: gradients(nodes[size]) for size in nodes},
        "divided": {op: divided(nodes[2], op) for op in ("SUM", "PREMUL_SUM")},
        "not finite": {bad: not_finite(nodes[2], bad) for bad in (float("inf"), float("nan"))},
        "feedback": {on: repeated(nodes[2], on) for on in (False, True)},
        "resumed": resumed(nodes[2]),
        "norms": norms(nodes[2]),
        "weights": {size: weights(nodes[size]) for size in nodes},
        "bytes": {name: traffic(nodes[2], PRESETS.get(name)) for name in ("plain", "zero++", "slow-link")},
        "trained": {(name, size): trained(nodes[size], comm) for name, comm in TRAINED.items() for size in (1, 2)},
        "plain": trained(nodes[2], None),
        "frozen": frozen(nodes[2]),
        "order": {checkpoints: order(nodes[2], checkpoints) for checkpoints in (False, True)},
    }


# gradients


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


def rounded(numbers: torch.Tensor, dtype: str) -> torch.Tensor:
    """The numbers of a slice as they arrive, written from the page on comm alone."""
    if dtype == "bf16":
        return torch.cat([numbers[:5], numbers[5:].bfloat16().float()])
    most, arrived = 2 ** (BITS[dtype] - 1) - 1, [numbers[:5]]
    for block in numbers[5:].split(128):
        scale = (block.abs().max() / most).bfloat16().float()
        arrived.append((block / scale).round().clamp(-most, most) * scale)
    return torch.cat(arrived)


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


# weights


def shard(rank: int) -> torch.Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(rank))


def weights(nodes: Nodes) -> dict[str, Any]:
    """FSDP2 gives a view into the output for the input."""
    arrived = {}
    for name, packing in {
        "int8": Packing("int8", LAYOUT),
        "bf16": Packing("bf16", LAYOUT),
        "as they are": None,
    }.items():
        output = torch.empty(RANKS * NUMBERS)
        own = output.view(RANKS, NUMBERS)[distributed.get_rank()]
        own.copy_(shard(distributed.get_rank()))
        WeightGather(nodes, packing, keeps=False)(output, own, distributed.group.WORLD)
        arrived[name] = output.numpy()
    return arrived


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_gather_the_same_weights_in_the_ranks_order(size: int, found: list[dict[str, Any]]) -> None:
    for one in found:
        for dtype, arrived in one["weights"][size].items():
            whole = torch.from_numpy(arrived).view(RANKS, NUMBERS)
            for rank in range(RANKS):
                expected = shard(rank) if dtype == "as they are" else rounded(shard(rank), dtype)
                torch.testing.assert_close(whole[rank], expected, rtol=1e-6, atol=1e-7)


# a model


WIDTH = 256
WEIGHTS = 2 * WIDTH * WIDTH


def traffic(nodes: Nodes, comm: Comm | None) -> dict[str, tuple[int, int]]:
    """Bytes between and within nodes, of the passes of a step, in 16 bits where nothing is quantised."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if comm is None else MixedPrecisionPolicy()
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if comm is not None:
        Communication(model, comm, nodes)
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


def test_bytes_within_nodes(found: list[dict[str, Any]]) -> None:
    """What a node's ranks have between them they gather in 8 bits, forward and backward."""
    for one in found:
        within = {name: [sizes[1] for sizes in passes.values()] for name, passes in one["bytes"].items()}
        int8, int4 = WEIGHTS * 130 // 128, WEIGHTS // 2 * 66 // 64
        assert within["zero++"] == [int8, int8 + int4]
        assert within["slow-link"] == [int8, int8 + int8]


TRAINED = {
    "bf16": BF16,
    "no secondary shard": Comm("bf16", "bf16", "bf16", secondary_shard="none", hadamard=False),
    "slow-link": PRESETS["slow-link"],
    "zero++": PRESETS["zero++"],
}


def trained(nodes: Nodes, comm: Comm | None) -> dict[str, Any]:
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
        Communication(model, comm, nodes).follow(optimizer)
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
@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 0.002), ("slow-link", 0.02), ("zero++", 0.04)])
def test_a_model_of_any_size_learns_what_it_does_without(
    name: str, tolerance: float, size: int, found: list[dict[str, Any]]
) -> None:
    for one in found:
        losses = [run["losses"] for run in (one["trained"][name, size], one["plain"])]
        torch.testing.assert_close(*map(torch.tensor, losses), rtol=tolerance, atol=0)


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


class Checkpointed(nn.Linear):
    """Computes its activations anew in backward, from outside of FSDP2's hooks, as transformers' layers do."""

    def __call__(self, x: torch.Tensor) -> Any:
        return checkpoint(super().__call__, x, use_reentrant=False)


class Recorded(WeightGather):
    """The gather of one layer, noted when it begins; whether it crosses nodes, too."""

    events: list[str]
    name = ""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.events.append(f"gather {self.name}" + " between nodes" * (self.secondary is None))
        super().__call__(*args, **kwargs)


def order(nodes: Nodes, checkpoints: bool) -> list[str]:
    """What happens in a step of three layers, in its order."""
    events: list[str] = []
    model = nn.Sequential(*[(Checkpointed if checkpoints else nn.Linear)(8, 8) for _ in range(3)])
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    Communication(model, Comm(), nodes)
    for name, layer in model.named_children():
        gather = Recorded(nodes, Packing("bf16", Layout((16, 2), (True, False))), keeps=True)
        gather.name, gather.events = name, events
        layer.set_custom_all_gather(gather)
        layer.register_full_backward_hook(lambda *_, name=name: events.append(f"backward {name}"))
    loss = model(torch.randn(3, 8, requires_grad=True)).square().mean()
    events.append("loss")
    loss.backward()
    return events


@pytest.mark.parametrize("checkpoints", [False, True])
def test_backward_gathers_a_layer_ahead_once_and_inside_the_node(
    checkpoints: bool, found: list[dict[str, Any]]
) -> None:
    """FSDP2's own prefetch (AxoNN's OAG) sees no difference, and serves a checkpoint's second forward, too."""
    for one in found:
        events = one["order"][checkpoints]
        forward, backward = events[: events.index("loss")], events[events.index("loss") + 1 :]
        assert forward == [f"gather {layer} between nodes" for layer in (0, 1, 2)]
        assert [event for event in backward if "gather" in event] == [f"gather {layer}" for layer in (2, 1, 0)]
        for layer in (1, 2):
            assert backward.index(f"gather {layer - 1}") < backward.index(f"backward {layer}")
