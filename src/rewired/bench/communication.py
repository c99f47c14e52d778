"""What communication takes: the time of all-reduces on a link, and the bytes of every collective of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from .emulated import EmulatedGroup
from .links import on_link
from .timing import Run, interleaved, timed

SIZES = tuple(4**power for power in range(6, 13))  # bytes, 4 KiB to 16 MiB
LARGE = 4**13  # 64 MiB, as a prefill of 4,096 tokens by a 70B sends


def measure_all_reduces(
    groups: Mapping[str, ProcessGroup],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    sizes: Sequence[int] | None = None,
    rounds: int = 15,
) -> list[dict[str, Any]]:
    """The rows under "all_reduce" of `results.json`: times on each of `groups`, named after links, by `sizes` in bytes.

    They are timed in turns. All ranks call this together, and return the same: medians of the slowest rank's times.
    """
    runs: dict[tuple[int, str], Run] = {}
    for size in sizes or (SIZES if torch.device(device).type == "cpu" else (*SIZES, LARGE)):
        tensor = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
        runs |= {(size, name): on_link(name, group, _timed_on(group, tensor)) for name, group in groups.items()}
    for run in runs.values():
        run()  # warms up
    rows = []
    for (size, name), samples in interleaved(runs, rounds, "bench: all-reduces: round").items():
        low, middle, high = quantiles(samples["seconds"], n=4, method="inclusive")
        where = {"gpus": distributed.get_world_size(), "link": name, "bytes": size}
        rows.append(where | {"seconds": middle, "quartiles": [low, high]})
    return rows


def _timed_on(group: ProcessGroup, tensor: torch.Tensor) -> Run:
    """Of one all-reduce. Several are timed in a row: ranks leave the barrier some time apart, and clocks are coarse."""
    in_a_row = max(4 if tensor.is_cuda else 1, min(16, (1 << 20) // tensor.nbytes))

    def reduce() -> None:
        for _ in range(in_a_row):
            distributed.all_reduce(tensor, group=group)

    return lambda: {"seconds": timed(reduce, group) / in_a_row}


def bytes_sent(run: Callable[[], object]) -> float:
    """What a rank of a ring sends while `run` runs: 2 (r - 1) / r of what it reduces, r - 1 of what it gathers."""
    group = distributed.group.WORLD
    if isinstance(group, EmulatedGroup):
        before = group.sent
        run()
        return group.sent - before
    with _Counter() as counter:
        run()
    return counter.bytes


# what a byte of the input costs r ranks; these collectives are all that a tensor-parallel model starts
_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda r: 2 * (r - 1) / r,
    "allreduce_": lambda r: 2 * (r - 1) / r,
    "all_gather_into_tensor": lambda r: r - 1,
    "all_to_all_single": lambda r: (r - 1) / r,
    "send": lambda r: 1,  # without NCCL, gathers and exchanges are made of it
    "_allgather_base_": lambda r: (r - 1) / r,  # FSDP2's, of what comes out
    "_reduce_scatter_base_": lambda r: r - 1,
}


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name in _FACTORS:
            self.bytes += _FACTORS[name](_ranks(args)) * _nbytes(args[0])
        if name == "wait_tensor":  # a payload's wait gathers; a mode does not see what an operation calls inside
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)
        return func(*args, **(kwargs or {}))


def _ranks(args: Sequence[Any]) -> int:
    """Of the group that a collective is of: the last text that it is given, or an object."""
    names = [each for each in args if isinstance(each, str)]
    group = next((each for each in args if isinstance(each, torch.ScriptObject)), None)
    if group is not None:
        return ProcessGroup.unbox(group).size()
    return _resolve_process_group(names[-1]).size()  # type: ignore[arg-type]  # a str


def _nbytes(sent: torch.Tensor | list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in (sent if isinstance(sent, list) else [sent]))
