"""Reading checkpoint folders: config, shapes, tensor headers, and where fitted or trained weights come from."""

from .checkpoint import Checkpoint

__all__ = ["Checkpoint"]
