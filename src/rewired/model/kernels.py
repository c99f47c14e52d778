"""Kernels: functions of tensors, compiled where a GPU runs them, so that each is one pass over its memory.

The function itself is what a CPU runs, and what its kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F, tensor: torch.Tensor) -> _F:
    """What runs `function` where `tensor` is."""
    return compiled(function) if tensor.is_cuda else function


@cache
def compiled(function: _F) -> _F:
    made: _F = torch.compile(function)  # type: ignore[assignment]  # it keeps the arguments
    return made
