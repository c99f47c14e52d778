"""The rotation as a step of a conversion: the source's weights, written in another basis of the residual stream."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewired.checkpoint.dtypes import cast_size, check_types
from rewired.checkpoint.rewired_config import wired_config
from rewired.ranks import choose_device
from rewired.rotate.request import BASIS_FILE, RECORD

from .disk_space import check_space
from .job import Job, OnBytes
from .rotation import text_of

if TYPE_CHECKING:
    import torch

_SCRATCH = ".rotated"


def rotate(job: Job, staging: Path, on_bytes: OnBytes) -> Job:
    """`job` with rotated weights, which are in `staging` until `discard_rotated`; leaves the basis there.

    Raises ValueError for weights that cannot be rotated, and where they do not fit on the disk.
    """
    import numpy

    from rewired.rotate.fold import write_rotated

    dtype, tensors = job.request.dtype, job.tensors.values()
    check_types(tensors, dtype, "rotated")
    needed = cast_size(tensors, dtype) if dtype else sum(info.size for info in tensors)
    assert job.plan.rotation is not None, "a rotation that is asked for is planned"
    check_space(job.out, needed + job.plan.rotation["untied_head"])
    basis, found = _basis(job)
    numpy.save(staging / BASIS_FILE, basis.numpy())
    name = str(job.source.folder.resolve()) if job.source.folder else job.source.base_model
    config = job.checkpoint.config | {RECORD: job.plan.rotation | found | {"base": name}}
    (staging / _SCRATCH).mkdir()
    basis = basis.to(choose_device("auto", 1))
    weights = write_rotated(job.weights, basis, staging / _SCRATCH, config, dtype, on_bytes)
    request = replace(job.request, copy=False)  # files of our own are linked, not copied once more
    return replace(job, weights=weights, tensors=weights.tensors(), request=request)


def _basis(job: Job) -> tuple[torch.Tensor, dict[str, Any]]:
    """The basis, [H, H], float32, and what its record says of how it was found."""
    from rewired.rotate.hadamard import block_hadamard, section_widths

    wiring, text = job.plan.wiring, text_of(job.request)
    hadamard = block_hadamard(section_widths(wiring))
    if text is None:
        return hadamard.float(), {}
    from rewired.rotate.missing import find_missing

    config = wired_config(job.checkpoint.config, wiring.to_json(), job.plan.tp_shards)
    missing, calibration = find_missing(config, job.checkpoint.folder, job.files, text)
    # where channels are quantised, it spreads what is first among those that have as many bits
    is_quantised = any(module.sections for module in wiring.modules)
    basis = missing.basis @ hadamard if is_quantised else missing.basis
    sent = sorted({module.shared_channels for module in wiring.modules if module.leaves_channels})
    shares = [[channels, *(round(share, 3) for share in missing.shares(channels))] for channels in sent]
    return basis.float(), {"text": calibration.name, "tokens": calibration.tokens, "shares": shares}


def discard_rotated(staging: Path) -> None:
    """Remove what the output needs no more, once its weights are linked or fitted."""
    shutil.rmtree(staging / _SCRATCH, ignore_errors=True)
