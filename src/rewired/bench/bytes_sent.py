"""The bytes that a rank sends: those of every collective that a run starts, counted where torch dispatches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def bytes_sent(run: Callable[[], object], ranks: int) -> float:
    """What a rank of a ring sends while `run` runs: 2 (r - 1) / r of what it reduces, r - 1 of what it gathers."""
    with _Counter(ranks) as counter:
        run()
    return counter.bytes


class _Counter(TorchDispatchMode):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.bytes = 0.0
        # what a byte of the input costs; these collectives are all that a tensor-parallel Llama starts
        self.factors = {"all_reduce": 2 * (ranks - 1) / ranks, "allreduce_": 2 * (ranks - 1) / ranks}
        self.factors |= {"all_gather_into_tensor": ranks - 1, "all_to_all_single": (ranks - 1) / ranks}
        self.factors["send"] = 1  # of which both are made without NCCL

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional"):
            self.bytes += self.factors.get(name, 0) * _nbytes(args[0])
        if name == "wait_tensor":  # a payload's wait gathers; a mode does not see what an operation calls inside
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)
        return func(*args, **(kwargs or {}))


def _nbytes(sent: torch.Tensor | list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in (sent if isinstance(sent, list) else [sent]))
