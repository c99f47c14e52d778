"""Ranks that torchrun has started, on one machine or several, of which this process is one."""

from __future__ import annotations

import os
from typing import TypeVar

from rewired.ranks import enter_group

T = TypeVar("T")


def is_joined() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def ranks_of_this_machine() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def join(device: str, timeout_seconds: float) -> None:
    """Enter the process group: NCCL on "cuda", gloo on "cpu"."""
    import torch

    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks_of_this_machine()))
    enter_group(device, int(os.environ["LOCAL_RANK"]), timeout_seconds)


def of_first_rank(value: T) -> T:
    """The first rank's value, which alone knows what is on its disk."""
    from torch import distributed

    if not is_joined():
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]
