"""The links that a bench measures on: the machine's own, and one that is made slow.

Over an emulated link gloo's threads have real-time priority: they stand for the engine of a network card.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import distributed

from rewired.grid.size import TpSize
from rewired.model import exchange

from . import torchrun
from .emulated import EmulatedGroup, Times
from .link import EmulatedLink, over_fast_link
from .models import meshes_of
from .request import TRANSFORMERS, VLLM, BenchRequest
from .timing import Run

LOOPBACK, SHARED_MEMORY, NCCL, NO_P2P = "loopback", "shared memory", "nccl", "no-p2p"
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
TIMEOUT_SECONDS = 1800.0  # of a collective: one rank may compile much longer than another


def check_link(request: BenchRequest, tp_sizes: Sequence[int]) -> None:
    """Raise ValueError where `request.link` is none that this run can have."""
    if request.emulation is not None:
        _check_emulation(request, tp_sizes)
        return
    if request.link is None:
        return
    if torchrun.is_joined():
        raise ValueError("--link is for ranks that rewired bench starts itself: leave it out, or torchrun.")
    if request.link == NO_P2P:
        if request.device != "cuda":
            raise ValueError(f"--link {NO_P2P} is for NVIDIA GPUs: give a rate, such as 1gbit, to ranks on a CPU.")
        if request.engine == VLLM:
            raise ValueError(f"--link {NO_P2P} is for NCCL, and vLLM has kernels of its own: leave out --engine vllm.")
        return
    link = EmulatedLink.parse(request.link)
    if request.device != "cpu":
        raise ValueError(f"--link {request.link} slows gloo down, and GPUs talk by NCCL: add --device cpu.")
    link.check_machine()


def _check_emulation(request: BenchRequest, tp_sizes: Sequence[int]) -> None:
    if torchrun.is_joined() or request.engine != TRANSFORMERS:
        raise ValueError("--emulated is for one process that runs transformers: leave out torchrun and --engine.")
    for ranks in tp_sizes:
        Times.of(request.link or "", ranks)


@contextmanager
def prepared(request: BenchRequest, ranks: int) -> Iterator[Callable[[int], None] | None]:
    """What each rank has to do before it joins the others, while the link stands."""
    if request.link is None or ranks == 1 or request.emulation is not None:
        yield None
    elif request.link == NO_P2P:
        yield _go_through_host_memory
    else:
        with EmulatedLink.parse(request.link).between(ranks) as network:
            yield network.enter


def groups(request: BenchRequest, tp: TpSize) -> dict[str, Any]:
    """A process group of all ranks for each link, with those of its meshes; called on the ranks."""
    world = distributed.group.WORLD
    if isinstance(world, EmulatedGroup):
        return dict.fromkeys(world.scales, world)
    if request.device == "cuda":
        return {request.link or NCCL: world}
    if request.link is None or distributed.get_world_size() == 1:
        return {LOOPBACK: world}
    with over_fast_link():
        fast = distributed.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
        meshes_of(fast, request, tp)
    meshes_of(world, request, tp)
    let_gloo_preempt()
    return {LOOPBACK: fast, request.link: world}


def on_link(link: str, group: Any, run: Run) -> Run:
    """`run`, over one of the links that share a group."""
    if not isinstance(group, EmulatedGroup):
        return run

    def run_there() -> Mapping[str, float]:
        group.line.scale = group.scales[link]
        return run()

    return run_there


def _go_through_host_memory(rank: int) -> None:
    os.environ["NCCL_P2P_DISABLE"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # or NVLink's switches would still reduce, from four GPUs on


def let_gloo_preempt() -> None:
    """Gloo's threads run as soon as a packet wakes them, whatever computes.

    Ordinary threads would wait for their turn at each of the four steps of an all-reduce. To be called when all groups
    are made and nothing has computed yet: then all threads but the first are those of groups and of their store.
    """
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) != os.getpid():
            _prefer(int(thread.name))
    exchange.post = _preferred(exchange.post)


def _preferred(post: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`post`, with the priority of gloo's threads.

    It holds locks that they try over and over. They would keep an ordinary thread from running, and so from giving
    these back, until the kernel stops them: up to a second.
    """

    @wraps(post)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        _prefer(0)
        try:
            return post(*args, **kwargs)
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    return run


def _prefer(thread: int) -> None:
    """Give a thread, this one where it is 0, real-time priority."""
    os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
