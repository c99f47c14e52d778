"""Activations between two steps of a refit: in host memory, and on the device that computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.utils._pytree import tree_map_only

from rewired.model.residual_stream import ResidualStream

Activations = TypeVar("Activations", torch.Tensor, ResidualStream)


def on_host(activations: Activations) -> Activations:
    return on_device(activations, torch.device("cpu"))


def on_device(activations: Activations, device: torch.device) -> Activations:
    return tree_map_only(torch.Tensor, lambda part: part.to(device), activations)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises ValueError, which says what to do, where a refit inside is out of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ValueError(
            "The GPU's memory is too small for this refit: hide it with CUDA_VISIBLE_DEVICES= to compute on the CPU, "
            "and the same command continues."
        ) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise ValueError("This machine's memory is too small for this refit: give it fewer tokens.") from None
