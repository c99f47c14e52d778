"""No stream of a GPU uses what another has in hand: every wiring and payload on two ranks, and what would spoil it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import Work

from rewired.bench.contenders import Contender
from rewired.bench.emulated import EmulatedGroup, GpuLine, Times
from rewired.bench.models import SharedWeights, build, mesh_of
from rewired.bench.request import Emulation
from rewired.model import reductions
from rewired.model.quantised_reduction import RankReduction
from rewired.model.side_stream import UnderWay
from rewired.ranks import run_on_ranks
from rewired.serve.vllm.side_stream import SideSums

from .happens_before import HappensBefore, Stream, streams_of_a_gpu
from .tiny import PAYLOADS, WIRINGS, llama_config, tokens

RANKS, SHARDS, WIDE = 2, 4, 128  # channels: of a payload a group for each rank
ALL = WIRINGS | PAYLOADS
CPU = torch.device("cpu")


def test_whatever_streams_share_is_used_in_order() -> None:
    (found,) = run_on_ranks(races_of_all, 1)
    assert set(found) == set(ALL)
    assert {name: races for name, races in found.items() if races} == {}


def test_what_would_spoil_it_is_found() -> None:
    (found,) = run_on_ranks(races_of_mutants, 1)
    assert set(found) == set(MUTANTS)
    assert [name for name, races in found.items() if not races] == []


def races_of_all() -> dict[str, list[str]]:
    with streams_of_a_gpu() as watch:
        mesh = mesh_of(join(watch), "cpu")
        return {name: races(model_of(ALL[name], mesh), PASSES, watch) for name in ALL}


def races_of_mutants() -> dict[str, list[str]]:
    with streams_of_a_gpu() as watch:
        mesh = mesh_of(join(watch), "cpu")
        models = [model_of(ALL[name], mesh) for name in ("ladder", "ladder-int6")]
        found = {}
        for name, (target, attribute, mutant) in MUTANTS.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(target, attribute, mutant)
                found[name] = [race for model in models for race in races(model, INFERENCES, watch)]
        return found


def races(model: Any, passes: Sequence[Pass], watch: HappensBefore) -> list[str]:
    return [
        f"{run.__name__}, {'compiled' if is_graph else 'eager'}: {race}"
        for run, is_graph in passes
        for race in watch.races(partial(run, model), is_graph)
    ]


@torch.no_grad()
def inference(model: Any) -> None:
    model(tokens(), use_cache=False)


def training(model: Any) -> None:
    model.train()(tokens(), labels=tokens(), use_cache=False).loss.backward()
    model.zero_grad()


def training_with_checkpoints(model: Any) -> None:
    model.activation_checkpointing_enable()
    training(model)
    model.activation_checkpointing_disable()


def inference_by_an_engine(model: Any) -> None:
    """Whose all-reduce, no collective of torch's, runs on a stream of its own, as vLLM's do."""
    group = distributed.group.WORLD.group_name
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reductions._start_of_engine, group, SideSums(lambda output: 2 * output, CPU).start)
        inference(model)


Pass = tuple[Callable[[Any], None], bool]  # what runs, and whether as a graph
INFERENCES: list[Pass] = list(product([inference, inference_by_an_engine], [False, True]))
PASSES: list[Pass] = [*INFERENCES, (training, False), (training, True), (training_with_checkpoints, False)]


def model_of(wiring: list[dict[str, Any]], mesh: Any) -> Any:
    config = llama_config(hidden_size=WIDE)
    model = build(Contender("", wiring), config, SHARDS, mesh)
    SharedWeights(torch.float32, CPU).fill(model)
    return model.requires_grad_(True)


def join(watch: HappensBefore) -> Any:
    """The first of two ranks, whose collectives run as NCCL's do: on a stream of their own, after the current one."""

    def hold(source: torch.Tensor, target: torch.Tensor, *_: Any) -> None:
        watch.read(source, "a collective")
        watch.write(target, "a collective")
        target.view(-1, source.numel()).copy_(source.view(1, -1))

    class Line(GpuLine):
        def run(self, seconds: float, source: torch.Tensor, target: torch.Tensor) -> Work:
            watch.write(target, "its allocation")
            return super().run(seconds, source, target)

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> EmulatedGroup:
        return EmulatedGroup(size, Times(*[lambda size: 0.0] * 3), Line(CPU, Emulation()), {})

    sys.modules["rewired.bench.hold_kernel"] = SimpleNamespace(hold=hold)  # which needs Triton
    distributed.destroy_process_group()
    distributed.Backend.register_backend("streams", create, devices=["cpu"])
    distributed.init_process_group("streams", store=distributed.HashStore(), rank=0, world_size=RANKS)
    return distributed.group.WORLD


def not_waiting(work: Work, timeout: timedelta = timedelta(0)) -> bool:
    return True


def keeping_nothing(under_way: UnderWay, event: Any, *tensors: torch.Tensor) -> None:
    Work.__init__(under_way)
    under_way.event = event


all_reduce = reductions.start_all_reduce


def without_a_copy(tensor: torch.Tensor, group: str) -> torch.Tensor:
    start = reductions._start_of_engine.get(group)
    return start(tensor) if start else all_reduce(tensor, group)


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a side stream that does not wait for the current one": (Stream, "wait_stream", lambda stream, other: None),
    "a wait for a sum that does not wait": (UnderWay, "wait", not_waiting),
    "a wait for a payload that does not wait": (RankReduction, "wait", not_waiting),
    "what a side stream reads is not kept": (UnderWay, "__init__", keeping_nothing),
    "no copy of what an engine sums": (reductions, "start_all_reduce", without_a_copy),
}
