"""Checkpoint folders: config, shape, wiring, tensors, and the original of fitted or trained weights."""

from .checkpoint import Checkpoint

__all__ = ["Checkpoint"]
