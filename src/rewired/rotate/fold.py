"""A basis of the residual stream, folded into a model's weights: what was a stream x is then x R.

RMSNorm divides by the same number in every orthonormal basis, once what reads it takes over its weight gamma:

    E' = E R    W' = W diag(gamma) R, of what reads the stream and of the head    W' = R^T W, b' = R^T b, of what writes

and gamma' = 1. The function is the same as long as nothing looks at single channels of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rewired.checkpoint import Checkpoint
from rewired.checkpoint.safetensors_header import read_header
from rewired.checkpoint.shape import Shape
from rewired.checkpoint.tensors import OnBytes, check_finite, read_tensor, rewrite

_ROWS = 4096  # multiplied at a time, so that the largest matrix is never in memory in several copies of float32


def write_rotated(
    checkpoint: Checkpoint,
    basis: torch.Tensor,
    folder: Path,
    config: Mapping[str, Any],
    dtype: str | None = None,
    on_bytes: OnBytes = lambda count, total: None,
) -> Checkpoint:
    """Write the weights of `checkpoint` in the `basis` R, [H, H], into the empty `folder`, and its `config`.

    They are computed where the basis is, and stored in the dtypes that they had, or in `dtype`. A tied head becomes a
    matrix of its own, beside the embedding. One file is in memory at a time.
    """
    files = {name: checkpoint.folder / info.file for name, info in checkpoint.tensors().items()}
    folding = _Folding(checkpoint.shape, files, basis, getattr(torch, dtype) if dtype else None)

    def tensors_of(path: Path) -> dict[str, torch.Tensor]:
        names = set(read_header(path))
        if folding.stored_head in names:
            names.add(folding.head)
        return {name: folding.tensor(name) for name in sorted(names)}

    return rewrite(checkpoint, folder, {**config, "tie_word_embeddings": False}, tensors_of, on_bytes)


class _Folding:
    """Tensors of the rotated model by name; computed in float32, or more where they have more."""

    def __init__(self, shape: Shape, files: Mapping[str, Path], basis: torch.Tensor, dtype: torch.dtype | None) -> None:
        self.files, self.basis, self.dtype = files, basis, dtype
        family = shape.family
        self.embedding, self.last_norm = (
            f"{family.in_base(name)}.weight" for name in (family.embedding, family.last_norm)
        )
        self.head = f"{family.head}.weight"
        # what the original reads as the head's weight; transformers, too, reads one that is there
        self.stored_head = self.head if self.head in files else self.embedding
        self.norms, self.norm_of, self.writers = {self.last_norm}, {self.head: self.last_norm}, set[str]()
        for layer in map(family.layer, range(shape.num_hidden_layers)):
            for module in family.modules:
                norm = f"{layer}.{module.norm}.weight"
                self.norms.add(norm)
                self.norm_of |= {f"{layer}.{module.path}.{reader.name}.weight": norm for reader in module.readers}
                self.writers |= {f"{layer}.{module.path}.{module.writer.name}.{kind}" for kind in ("weight", "bias")}

    def tensor(self, name: str) -> torch.Tensor:
        source = self._read(self.stored_head if name == self.head else name)
        if not source.is_floating_point():
            return source
        folded = self._folded(name, source.to(torch.promote_types(source.dtype, torch.float32)))
        return folded.to(self.dtype or source.dtype).contiguous()

    def _folded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == self.embedding:
            return self._times_basis(tensor)
        if name in self.norm_of:
            return self._times_basis(tensor, self._read(self.norm_of[name]))
        if name in self.norms:
            return torch.ones_like(tensor)
        if name in self.writers:
            return self._times_basis(tensor.T).T if tensor.ndim == 2 else self._times_basis(tensor[None])[0]
        return tensor  # biases of what reads the stream, what lies within a module, and what no model reads

    def _times_basis(self, rows: torch.Tensor, gamma: torch.Tensor | None = None) -> torch.Tensor:
        """[n, H] -> rows diag(gamma) R, [n, H]."""
        basis = self.basis.to(rows.dtype)
        if gamma is not None:
            basis = gamma.to(basis)[:, None] * basis
        return torch.cat([(part.to(basis.device) @ basis).to(rows.device) for part in rows.split(_ROWS)])

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = read_tensor(self.files[name], name)
        check_finite(name, tensor)
        return tensor
