"""What of communication runs behind compute, on four ranks, by the order of events."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import ReduceOp, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from rewired.comm.communication import Communication
from rewired.comm.gradients import GradientScatter
from rewired.comm.nodes import Nodes
from rewired.comm.options import Comm
from rewired.comm.packing import Layout, Packing, Parts
from rewired.comm.weights import WeightGather

from .slices import LAYOUT, NUMBERS, RANKS


class Checkpointed(nn.Linear):
    """Computes its activations anew in backward, from outside of FSDP2's hooks; transformers' layers do so inside."""

    def __call__(self, x: torch.Tensor) -> Any:
        return checkpoint(super().__call__, x, use_reentrant=False)


class Gather(WeightGather):
    """The gather of one layer, noted when it begins, with whether it crosses nodes, and when it is complete."""

    events: list[str]
    name = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append(f"gather {self.name}" + " between nodes" * (self.secondary is None))
        return super().__call__(*args, **kwargs)

    def _write(self, *args: Any) -> None:
        super()._write(*args)
        self.events.append(f"has {self.name}")


class Scatter(GradientScatter):
    """The same of gradients."""

    events: list[str]
    name = ""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.events.append(f"reduce {self.name}")
        super().__call__(*args, **kwargs)

    def _write(self, *args: Any) -> None:
        super()._write(*args)
        self.events.append(f"reduced {self.name}")


def order(nodes: Nodes, checkpoints: bool) -> dict[str, list[str]]:
    """What happens in the passes of two batches through three layers, in its order."""
    events: list[str] = []
    model = nn.Sequential(*[(Checkpointed if checkpoints else nn.Linear)(8, 8) for _ in range(3)])
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    communication = Communication(model, Comm(), nodes)
    for name, layer in model.named_children():
        gather = Gather(nodes, Packing("bf16", Layout((16, 2), (True, False))), keeps=True)
        scatter = Scatter(nodes, Layout((16, 2), (True, False)), Comm(), communication.gradients[name].read_at_once)
        for own in (gather, scatter):
            own.name, own.events = name, events
        layer.set_custom_all_gather(gather)
        layer.set_custom_reduce_scatter(scatter)
        layer.register_forward_hook(lambda *_, name=name: events.append(f"forward {name}"))
        layer.register_full_backward_hook(lambda *_, name=name: events.append(f"backward {name}"))
    passes = {}
    for batch in ("first", "second"):
        loss = model(torch.randn(3, 8, requires_grad=True)).square().mean()
        passes[f"{batch} forward"], events[:] = events.copy(), []
        loss.backward()
        passes[f"{batch} backward"], events[:] = events.copy(), []
    return passes


@pytest.mark.parametrize("checkpoints", [False, True])
def test_forward_gathers_a_layer_while_the_one_before_computes(checkpoints: bool, found: list[dict[str, Any]]) -> None:
    """AxoNN's OAG, which FSDP2 leaves to streams, and so does not have on CPUs."""
    for one in found:
        assert one["order"][checkpoints]["first forward"] == [
            *("gather 0 between nodes", "has 0", "gather 1 between nodes", "forward 0"),
            *("has 1", "gather 2 between nodes", "forward 1"),
            *("has 2", "forward 2"),
        ]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_backward_gathers_a_layer_ahead_once_and_inside_the_node(
    checkpoints: bool, found: list[dict[str, Any]]
) -> None:
    """FSDP2's own prefetch (AxoNN's OAG) sees no difference, and serves a checkpoint's second forward, too."""
    for one in found:
        backward = one["order"][checkpoints]["first backward"]
        assert [event for event in backward if "gather" in event] == [f"gather {layer}" for layer in (2, 1, 0)]
        for layer in (1, 2):
            assert backward.index(f"gather {layer - 1}") < backward.index(f"backward {layer}")


@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_are_reduced_while_the_layers_before_compute_unless_they_are_added_to_others(
    checkpoints: bool, found: list[dict[str, Any]]
) -> None:
    """AxoNN's ORS: FSDP2 reads at once what it adds to gradients of a batch before."""
    for one in found:
        for batch in ("first", "second"):
            events = [event for event in one["order"][checkpoints][f"{batch} backward"] if "reduce" in event]
            reductions = [[f"reduce {layer}", f"reduced {layer}"] for layer in (2, 1, 0)]
            late = [first for first, _ in reductions] + [second for _, second in reductions]
            assert events == (late if batch == "first" else [event for pair in reductions for event in pair])
        backward = one["order"][checkpoints]["first backward"]
        assert backward.index("reduce 2") < backward.index("backward 1") < backward.index("reduced 2")


class Held(GradientScatter):
    """A reduction, noted hop by hop. What leaves for other nodes is held back until somebody waits for it."""

    events: list[str]

    def _hop(self, blocks: slice, parts: Parts, dtype: str, group: Any, is_last: bool) -> Any:
        name = f"{'between' if is_last else 'within'} {blocks.start}"
        start = partial(super()._hop, blocks, parts, dtype, group, is_last)
        under_way = None if is_last else start()
        self.events.append(f"{name} leaves")

        def total() -> Parts:
            arrived = (under_way or start())()
            self.events.append(f"{name} arrives")
            return arrived

        return total


def pipeline(nodes: Nodes) -> dict[str, Any]:
    arrived, scatter = [], Held(nodes, LAYOUT, Comm(pipeline=3))
    scatter.events = []
    for one in (scatter, GradientScatter(nodes, LAYOUT, Comm())):
        output, whole = torch.empty(NUMBERS), torch.randn(RANKS * NUMBERS, generator=torch.Generator().manual_seed(0))
        one(output, whole, distributed.group.WORLD, ReduceOp.AVG)
        arrived.append(output.numpy())
    return {"events": scatter.events, "arrived": arrived}


def test_a_chunk_is_between_nodes_while_the_next_one_is_inside_the_node(found: list[dict[str, Any]]) -> None:
    """ZeRO++'s section 4.1.2. No chunk inside a node waits for one between nodes."""
    for one in found:
        assert one["pipeline"]["events"] == [
            *("within 0 leaves", "within 1 leaves", "within 2 leaves"),
            *("within 0 arrives", "between 0 leaves", "within 1 arrives", "between 1 leaves"),
            *("within 2 arrives", "between 2 leaves"),
            *("between 0 arrives", "between 1 arrives", "between 2 arrives"),
        ]
        held, at_once = one["pipeline"]["arrived"]
        assert (held == at_once).all()


def read_early(nodes: Nodes) -> dict[str, list[Any]]:
    """A layer's gradient where FSDP2 casts it, and where a hook reads it: as a training has it, and forced to be
    complete at once."""
    seen: dict[str, list[Any]] = {"cast": [], "hook": []}
    for kind, policy in {
        "cast": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        "hook": MixedPrecisionPolicy(),
    }.items():
        for at_once in (False, True):
            torch.manual_seed(0)
            layer = nn.Linear(64, 64, bias=False)
            fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
            [scatter] = Communication(layer, Comm(), nodes).gradients.values()
            scatter.read_at_once = (lambda _: True) if at_once else scatter.read_at_once
            hooked: list[Any] = []
            if kind == "hook":
                layer.weight.register_post_accumulate_grad_hook(
                    lambda weight, hooked=hooked: hooked.append(weight.grad.to_local().numpy().copy())
                )
            layer(torch.randn(3, 64)).square().mean().backward()
            seen[kind].append(hooked[0] if hooked else layer.weight.grad.to_local().numpy())
    return seen


@pytest.mark.parametrize("kind", ["cast", "hook"])
def test_what_reads_a_gradient_before_backward_ends_finds_it_complete(kind: str, found: list[dict[str, Any]]) -> None:
    for one in found:
        early, at_once = one["read early"][kind]
        assert (early == at_once).all() and (early != 0).any()
