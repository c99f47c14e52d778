"""An engine's own all-reduce on a stream of its own, beside the module that hides it. For CUDA; never run on a GPU.

NCCL's all-reduces run beside compute by themselves. vLLM's kernels, faster among the GPUs of a machine, do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._distributed_c10d import _register_work

from rewired.model.side_stream import SideStream, UnderWay


class SideSums(SideStream):
    """Starts the sums of `all_reduce`, which returns another tensor than it is given.

    An engine's kernels share their buffers, so no two sums may run at a time: those on this stream follow one another,
    and whoever sums on another stream joins first.
    """

    def __init__(self, all_reduce: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        super().__init__(device)
        self.all_reduce = all_reduce

    def start(self, output: torch.Tensor) -> torch.Tensor:
        """The sum, under way: to be read only after a wait."""
        total, event = self.run(lambda: self.all_reduce(output))
        _register_work(total, UnderWay(event, output))
        return total
