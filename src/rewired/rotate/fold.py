"""A basis of the residual stream, folded into a Llama's weights: what was a stream x is then x R.

RMSNorm divides by the same number in every orthonormal basis, once what reads it takes over its weight gamma:

    E' = E R    W' = W diag(gamma) R, of q, k, v, gate, up and the head    W' = R^T W, b' = R^T b, of o and down

and gamma' = 1. The function is the same as long as nothing looks at single channels of the stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rewired.checkpoint.checkpoint import INDEX, Checkpoint, read_json
from rewired.checkpoint.tensors import read_tensor, save_tensors, write_index

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_NORM_OF = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm") | dict.fromkeys(
    ("gate_proj", "up_proj"), "post_attention_layernorm"
)
_WRITERS = ("o_proj", "down_proj")
_ROWS = 4096  # multiplied at a time, so that the largest matrix is never in memory in several copies of float32


def write_rotated(
    checkpoint: Checkpoint,
    basis: torch.Tensor,
    folder: Path,
    config: Mapping[str, Any],
    dtype: str | None = None,
    on_bytes: Callable[[int, int], None] = lambda count, total: None,
) -> Checkpoint:
    """Write the weights of `checkpoint` in the `basis` R, [H, H], into the empty `folder`, and its `config`.

    They are computed where the basis is, and stored in the dtypes that they had, or in `dtype`. A tied head becomes a
    matrix of its own, beside the embedding. One file is in memory at a time; `on_bytes` hears how many bytes
    each of the original's has, and all of them.
    """
    files = {name: checkpoint.folder / info.file for name, info in checkpoint.tensors().items()}
    head = HEAD if HEAD in files else EMBEDDING  # transformers, too, reads one that is there
    folding = _Folding(files, basis, head, getattr(torch, dtype) if dtype else None)
    total = sum(path.stat().st_size for path in checkpoint.weight_files())
    for path in checkpoint.weight_files():
        with safe_open(path, framework="pt") as file:
            names, metadata = set(file.keys()), file.metadata()
        if head in names:
            names.add(HEAD)
        save_tensors({name: folding.tensor(name) for name in sorted(names)}, folder / path.name, metadata)
        (folder / path.name).chmod(path.stat().st_mode)
        on_bytes(path.stat().st_size, total)
    if (checkpoint.folder / INDEX).is_file():
        write_index(folder, read_json(checkpoint.folder / INDEX).get("metadata", {}))
    rotated = dict(config) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(rotated, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return Checkpoint.open(folder)


@dataclass(frozen=True)
class _Folding:
    """Tensors of the rotated model by name; computed in float32, or more where they have more."""

    files: Mapping[str, Path]  # of the original's
    basis: torch.Tensor
    head: str  # what the original reads as the head's weight
    dtype: torch.dtype | None

    def tensor(self, name: str) -> torch.Tensor:
        source = self._read(self.head if name == HEAD else name)
        if not source.is_floating_point():
            return source
        folded = self._folded(name, source.to(torch.promote_types(source.dtype, torch.float32)))
        return folded.to(self.dtype or source.dtype).contiguous()

    def _folded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        *prefix, module, kind = ["", "", *name.split(".")]
        if name == EMBEDDING:
            return self._times_basis(tensor)
        if name == HEAD:
            return self._times_basis(tensor, self._read(LAST_NORM))
        if name == LAST_NORM or module in _NORM_OF.values():
            return torch.ones_like(tensor)
        if module in _WRITERS:
            return self._times_basis(tensor.T).T if kind == "weight" else self._times_basis(tensor[None])[0]
        if module in _NORM_OF and kind == "weight":
            return self._times_basis(tensor, self._read(name.replace(f"{prefix[-1]}.{module}", _NORM_OF[module])))
        return tensor  # biases of what reads the stream, and what no Llama reads

    def _times_basis(self, rows: torch.Tensor, gamma: torch.Tensor | None = None) -> torch.Tensor:
        """[n, H] -> rows diag(gamma) R, [n, H]."""
        basis = self.basis.to(rows.dtype)
        if gamma is not None:
            basis = gamma.to(basis)[:, None] * basis
        return torch.cat([(part.to(basis.device) @ basis).to(rows.device) for part in rows.split(_ROWS)])

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = read_tensor(self.files[name], name)
        return tensor
