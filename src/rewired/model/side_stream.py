"""Work on a GPU's stream of its own, beside what the current stream does next. Never run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Work

T = TypeVar("T")
URGENT, PATIENT = -1, 0  # priorities: kernels of the first do not queue behind the many blocks of a large product


class SideStream:
    def __init__(self, device: torch.device, priority: int = URGENT) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)

    def run(self, work: Callable[[], T]) -> tuple[T, torch.cuda.Event]:
        """What `work` gives, under way after all that the current stream was given; to be read after the event."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            return work(), self.stream.record_event()

    def join(self) -> None:
        """Let the current stream go on after all work that was started."""
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class UnderWay(Work):
    """What a wait waits for. It keeps tensors that the work still reads: until then their memory is its own."""

    def __init__(self, event: torch.cuda.Event, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.event, self.tensors = event, tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.event.wait()
        return True
