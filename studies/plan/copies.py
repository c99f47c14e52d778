"""All-reduces of NVLink machines whose NCCL may not use peer-to-peer access (NCCL_P2P_DISABLE=1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rewired.plan.all_reduce_time import AllReduce

COPIED = 64 * 1024  # bytes of the largest message that is copied on a node of more than two GPUs: the runs fit no other


@dataclass(frozen=True)
class Copies:
    """Messages go through the host's memory in chunks: latency and the time of their bytes add up as in a pipeline.

    NVLink's switches (NVLS) reduce large ones, though, and each step of their handshake takes longer. NCCL leaves them
    off for two GPUs (its nvls.cc).
    """

    base: float  # seconds
    step: float  # seconds from GPU to GPU, up to four, which hang on one processor
    far_step: float
    bandwidth: float  # bytes/s
    switch_step: float  # seconds

    def at(self, size: float, gpus: int) -> float:
        latency = self.base + 2 * (gpus - 1) * (self.step if gpus <= 4 else self.far_step)
        return (math.sqrt(latency) + math.sqrt(2 * (gpus - 1) / gpus * size / self.bandwidth)) ** 2


@dataclass(frozen=True)
class Copied(AllReduce):
    """All-reduces without peer-to-peer access."""

    copies: Copies = field(kw_only=True)
    hide_of_copies: float = field(kw_only=True)

    def within_node(self, size: float, gpus: int) -> float:
        if self._is_copied(size, gpus):
            return self.copies.at(size, min(gpus, self.gpus_per_node))
        return super().within_node(size, gpus) + 2 * (gpus - 1) * self.copies.switch_step

    def latency(self, size: float, gpus: int) -> float:
        if self._is_copied(size, gpus):
            return super().latency(0, gpus)
        return self.scale * super().within_node(0, gpus)

    def hidden(self, size: float, gpus: int) -> float:
        return self.hide_of_copies if self._is_copied(size, gpus) else self.hide

    def _is_copied(self, size: float, gpus: int) -> bool:
        """Where the switches do not reduce: on two GPUs, small messages, and between nodes."""
        return gpus == 2 or gpus > self.gpus_per_node or size <= COPIED
