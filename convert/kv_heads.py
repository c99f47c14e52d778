"""KV heads as a step of a conversion: repeated for more ranks than they are, or merged on the way back to dense."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.kv_heads import are_equal, copies_in, with_copies, write_merged, write_with_copies

from .disk_space import check_space
from .job import Job, OnBytes

_SCRATCH = ".kv-heads"


def repeat_kv_heads(job: Job, staging: Path, on_bytes: OnBytes) -> Job:
    """`job` with each KV head as often as its plan says, in `staging` until `discard_kv_heads`."""
    copies = job.plan.kv_copies
    wider = replace(job, checkpoint=with_copies(job.checkpoint, copies))
    return _placed(wider, staging, lambda scratch: write_with_copies(job.weights, copies, scratch, on_bytes))


def merge_kv_heads(job: Job, staging: Path, on_bytes: OnBytes) -> tuple[Job, list[str]]:
    """`job` with each KV head once, likewise, or as it is where copies differ; and a note for users."""
    copies = copies_in(job.weights)
    if not are_equal(job.weights):
        heads = job.weights.shape.num_key_value_heads
        return job, [f"Copies of KV heads differ by now, so they are not merged: the model keeps {heads} KV heads."]
    merged = _placed(job, staging, lambda scratch: write_merged(job.weights, scratch, on_bytes))
    checkpoint = replace(job.checkpoint, config=merged.weights.config, shape=merged.weights.shape)
    return replace(merged, checkpoint=checkpoint), [
        f"The {copies} copies of each KV head were equal, and are one again."
    ]


def _placed(job: Job, staging: Path, write: Callable[[Path], Checkpoint]) -> Job:
    check_space(job.out, sum(info.size for info in job.tensors.values()) * max(1, job.plan.kv_copies))
    (staging / _SCRATCH).mkdir()
    weights = write(staging / _SCRATCH)
    # files of our own are linked, not copied once more
    return replace(job, weights=weights, tensors=weights.tensors(), request=replace(job.request, copy=False))


def discard_kv_heads(staging: Path) -> None:
    """Remove what the output needs no more, once its weights are linked, rotated or fitted."""
    shutil.rmtree(staging / _SCRATCH, ignore_errors=True)
