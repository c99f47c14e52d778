"""An engine's own all-reduce on a stream of its own, beside the module that hides it. For CUDA; never run on a GPU.

NCCL's all-reduces run beside compute by themselves. vLLM's kernels, faster among the GPUs of a machine, do not.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work, _register_work


class SideStream:
    """Starts the sums of `all_reduce`, which returns another tensor than it is given.

    An engine's kernels share their buffers, so no two sums may run at a time: those on this stream follow one another,
    and whoever sums on another stream joins first.
    """

    def __init__(self, all_reduce: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        self.all_reduce, self.stream = all_reduce, torch.cuda.Stream(device)

    def start(self, output: torch.Tensor) -> torch.Tensor:
        """The sum, under way: to be read only after a wait."""
        self.stream.wait_stream(torch.cuda.current_stream(output.device))
        with torch.cuda.stream(self.stream):
            total = self.all_reduce(output)
            _register_work(total, _UnderWay(self.stream.record_event(), output))
        return total

    def join(self) -> None:
        """Let the current stream go on after all sums that were started."""
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class _UnderWay(Work):
    """What a wait for a sum waits for. It keeps the input, whose memory is another stream's to use again until then."""

    def __init__(self, event: torch.cuda.Event, output: torch.Tensor) -> None:
        super().__init__()
        self.event, self.output = event, output

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.event.wait()
        return True
