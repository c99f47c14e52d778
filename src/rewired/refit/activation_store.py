"""The activation store: activations between two steps, in host memory or offloaded to files."""

from __future__ import annotations

import os
import tempfile
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
