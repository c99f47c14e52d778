"""KV heads as a step of a conversion: repeated for more ranks than they are, or merged on the way back to dense."""

from __future__ import annotations

from dataclasses import replace

from rewired.checkpoint.kv_heads import are_equal, copies_in, with_copies, write_merged, write_with_copies

from .job import Job


def repeat_kv_heads(job: Job) -> Job:
    """`job` with each KV head as often as its plan says."""
    copies = job.plan.kv_copies
    wider = replace(job, checkpoint=with_copies(job.checkpoint, copies))
    return wider.with_weights(
        "kv-heads", _size(job) * copies, lambda folder: write_with_copies(job.weights, copies, folder, job.on_bytes)
    )


def merge_kv_heads(job: Job) -> tuple[Job, list[str]]:
    """`job` with each KV head once, or as it is where copies differ; and a note for users."""
    copies = copies_in(job.weights)
    if not are_equal(job.weights):
        heads = job.weights.shape.num_key_value_heads
        return job, [f"Copies of KV heads differ by now, so they are not merged: the model keeps {heads} KV heads."]
    merged = job.with_weights("kv-heads", _size(job), lambda folder: write_merged(job.weights, folder, job.on_bytes))
    checkpoint = replace(job.checkpoint, config=merged.weights.config, shape=merged.weights.shape)
    note = f"The {copies} copies of each KV head were equal, and are one again."
    return replace(merged, checkpoint=checkpoint), [note]


def _size(job: Job) -> int:
    return sum(info.size for info in job.tensors.values())
