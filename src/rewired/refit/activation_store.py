"""The activation store: activations between two steps, in host memory or offloaded to files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from rewired.model.residual_stream import ResidualStream


class ActivationStore:
    """Keeps tensors on the CPU; with a `folder`, offloaded to files there, which vanish with their tensors."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.folder is None:
            return tensor.cpu()
        handle, path = tempfile.mkstemp(dir=self.folder)
        try:
            os.posix_fallocate(handle, 0, max(tensor.nbytes, 1))  # a full disk raises here, not a signal at a write
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        finally:
            os.close(handle)
        mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        Path(path).unlink()  # the space is given back with the tensor
        return mapped.copy_(tensor)

    def put_stream(self, stream: ResidualStream) -> ResidualStream:
        return tree_map_only(torch.Tensor, self.put, stream)


def on_device(stream: ResidualStream, device: torch.device) -> ResidualStream:
    return tree_map_only(torch.Tensor, lambda part: part.to(device), stream)


@contextmanager
def activation_store(spill: Path | None) -> Iterator[ActivationStore]:
    """One for a refit, in memory or in files below `spill`.

    Raises ValueError, which says what to do, where what runs inside is out of memory.
    """
    with tempfile.TemporaryDirectory(dir=spill, prefix="rewired-spill-") as folder:
        try:
            yield ActivationStore(Path(folder) if spill else None)
        except torch.OutOfMemoryError:
            raise ValueError(
                "The GPU's memory is too small for this refit: hide it with CUDA_VISIBLE_DEVICES= to compute on the "
                "CPU, and the same command continues."
            ) from None
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
                raise
            raise ValueError(
                "This machine's memory is too small for this refit: give it fewer tokens, or --spill a folder for the "
                "activations, and the same command continues."
            ) from None
