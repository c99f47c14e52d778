"""One rank among emulated ones: what its collectives leave, and how long it waits for them, by a clock that is ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from rewired.bench import emulated
from rewired.bench.emulated import CpuLine, Times
from rewired.bench.request import Emulation
from rewired.plan.all_reduce_time import measured_curves
from rewired.ranks import run_on_ranks


@dataclass
class Clock:
    """Stands for the module `time`: sleeping is all that takes any."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(emulated, "time", made)
    return made


def test_a_wait_lasts_as_long_as_a_collective_that_nothing_hides(clock: Clock) -> None:
    line, tensor = CpuLine(), torch.ones(2)
    line.run(3.0, tensor, tensor).wait()
    assert clock.now == 103


def test_what_is_computed_meanwhile_is_not_waited_for(clock: Clock) -> None:
    line, tensor = CpuLine(), torch.ones(2)
    first, second = line.run(3.0, tensor, tensor), line.run(2.0, tensor, tensor)  # one after the other
    clock.sleep(4.0)
    first.wait()
    assert clock.now == 104
    second.wait()
    assert clock.now == 105


def test_times_scale(clock: Clock) -> None:
    line, tensor = CpuLine(), torch.ones(2)
    line.scale = 0.5
    line.run(3.0, tensor, tensor).wait()
    assert clock.now == 101.5


def test_times_are_those_that_were_measured() -> None:
    size = 2.0**20
    times = Times.of("h100:nccl", 8)
    for found, collective in (
        (times.all_reduce, "all_reduce"),
        (times.all_to_all, "reduce_scatter"),  # which sends as much
        (times.all_gather, "all_gather"),
    ):
        assert found(size) == measured_curves("h100_sxm", "nccl", collective)[8].at(size)
    with pytest.raises(ValueError, match="There is no hardware 'h1000'"):
        Times.of("h1000:nccl", 8)
    with pytest.raises(ValueError, match="There is no library 'mpi'"):
        Times.of("h100:mpi", 8)


def test_torch_finds_eight_ranks_and_gets_back_what_this_one_gives() -> None:
    (found,) = run_on_ranks(through_torch, 1)
    assert found == {
        "ranks": (0, 8),
        "all_reduce": [3, 3],
        "in_place": [2, 2],
        "all_to_all": list(range(16)),
        "all_gather": [1] * 16,
        "compiled": [5, 5],
    }


def through_torch() -> dict[str, object]:
    torch.distributed.destroy_process_group()
    name = emulated.join(8, "h100:nccl", torch.device("cpu"), Emulation()).group_name
    functional, own, rows = torch.ops._c10d_functional, torch.ones(2), torch.arange(16.0).view(8, 2)

    def step(tensor: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(tensor + 1, "sum", name)) * 2 + 1

    started = {
        "all_reduce": functional.all_reduce(3 * own, "sum", name),
        "all_to_all": functional.all_to_all_single(rows, [1] * 8, [1] * 8, name),
        "all_gather": functional.all_gather_into_tensor(own[None], 8, name),
    }
    arrived = {collective: functional.wait_tensor(tensor) for collective, tensor in started.items()}
    arrived["in_place"] = 2 * own
    torch.distributed.all_reduce(arrived["in_place"])
    arrived["compiled"] = torch.compile(step, fullgraph=True, backend="aot_eager")(own)
    ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {"ranks": ranks} | {collective: tensor.flatten().tolist() for collective, tensor in arrived.items()}
