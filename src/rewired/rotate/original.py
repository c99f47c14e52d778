"""The original of a checkpoint, in its basis and with its KV heads: what a training compares hidden states with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy
import torch

from rewired.cache import cache_folder, digest, made_once
from rewired.checkpoint import Checkpoint
from rewired.checkpoint.checkpoint import inside
from rewired.checkpoint.kv_heads import write_with_copies

from .fold import write_rotated
from .request import BASIS_FILE, RECORD


def as_made(made: Path, original: Path) -> Path:
    """The folder of `original` or, if the checkpoint in `made` has other KV heads or another basis, of a copy in the
    cache that has them, too.

    Raises ValueError where the basis is missing or does not fit.
    """
    return _in_basis_of(made, _with_kv_heads_of(made, original))


def _with_kv_heads_of(made: Path, original: Path) -> Path:
    source = Checkpoint.open(original)
    copies = Checkpoint.open(made).shape.num_key_value_heads // source.shape.num_key_value_heads
    if copies == 1:
        return original
    digests = " ".join(map(digest, source.weight_files()))
    name = f"{original.name}-{copies}-kv-copies-{hashlib.sha256(digests.encode()).hexdigest()[:12]}"
    return made_once(cache_folder() / "models" / name, lambda folder: write_with_copies(source, copies, folder))


def _in_basis_of(made: Path, original: Path) -> Path:
    source, record = Checkpoint.open(original), Checkpoint.open(made).config.get(RECORD)
    if record is None or RECORD in source.config:
        return original
    path, width = inside(made, BASIS_FILE), source.shape.hidden_size
    basis = torch.from_numpy(numpy.load(path, allow_pickle=False))
    if basis.shape != (width, width):
        raise ValueError(f"{path} has shape {list(basis.shape)}, and the original's stream has {width} channels.")
    digests = " ".join(digest(file) for file in [path, *source.weight_files()])
    name = f"{original.name}-rotated-{hashlib.sha256(digests.encode()).hexdigest()[:12]}"
    config = source.config | {RECORD: record}
    return made_once(cache_folder() / "models" / name, lambda folder: write_rotated(source, basis, folder, config))
