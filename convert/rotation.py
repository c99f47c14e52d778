"""The rotation as a step of a conversion: planned, done by writing the weights in another basis, and put in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.rewired_config import wired_config
from rewired.checkpoint.safetensors_header import cast_size, check_types
from rewired.model.wiring import Wiring
from rewired.quantities import count, size
from rewired.ranks import choose_device
from rewired.refit.request import RefitRequest
from rewired.rotate.request import BASIS_FILE, RECORD, TOKENS, check_kind

from .changed_weights import check_basis
from .request import Request

if TYPE_CHECKING:
    import torch

    from .job import Job


def plan_rotation(checkpoint: Checkpoint, request: Request, wiring: Wiring) -> dict[str, Any] | None:
    """What is known of the rotation that `request` asks for, as its record says it; None without one.

    Raises ValueError where it would do nothing, or where the weights fit the basis that they have.
    """
    if request.rotate is None:
        return None
    check_basis(checkpoint)
    if request.rotate == "missing" and not any(module.leaves_channels for module in wiring.modules):
        raise ValueError(
            "--rotate missing orders channels by what is missing where they are not sent, and no module of this wiring "
            "sends only some: take --rotate hadamard, or partial layers, or a payload with channels of 0 bits."
        )
    shape, item_bytes = checkpoint.shape, 4 if (request.dtype or checkpoint.dtype) == "float32" else 2
    head = shape.vocab_size * shape.hidden_size * item_bytes if shape.tie_word_embeddings else 0
    return {"kind": request.rotate, "untied_head": head}


def text_of(request: Request) -> RefitRequest | None:
    """The text that a rotation is found on, that of the refit if there is one; None where it needs none."""
    if request.rotate != "missing":
        return None
    text = request.refit or RefitRequest()
    return replace(text, tokens=min(text.tokens, TOKENS))


def rotate(job: Job) -> Job:
    """`job` with rotated weights; leaves the basis beside the output.

    Raises ValueError for weights that cannot be rotated, and where they do not fit on the disk.
    """
    import numpy

    from rewired.rotate.fold import write_rotated

    dtype, tensors = job.request.dtype, job.tensors.values()
    check_types(tensors, dtype, "rotated")
    rotation = job.plan.rotation
    assert rotation is not None, "a rotation that is asked for is planned"
    needed = rotation["untied_head"] + cast_size(tensors, dtype)

    def write(folder: Path) -> Checkpoint:
        basis, found = _basis(job)
        numpy.save(job.staging / BASIS_FILE, basis.numpy())
        config = job.checkpoint.config | {RECORD: rotation | found | {"base": job.source.recorded_name}}
        basis = basis.to(choose_device("auto", 1))
        return write_rotated(job.weights, basis, folder, config, dtype, job.on_bytes)

    return job.with_weights("rotated", needed, write)


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


def notes_on_rotation(record: Mapping[str, Any] | None) -> list[str]:
    """Sentences for users and for the card on a rotation, by its `record`; none without one.

    Raises ValueError for an unknown rotation.
    """
    if record is None:
        return []
    check_kind(record["kind"])
    notes = [
        f"The residual stream is in another basis ({_KINDS[record['kind']]}), folded into the weights: {BASIS_FILE} "
        "has it. What was trained on the original, such as an adapter, does not fit."
    ]
    for channels, before, after in record.get("shares", []):
        notes.append(
            f"Of what shards miss, the first {count(channels, 'channel')} hold {after:.2f}, and {before:.2f} before "
            f"({record['tokens']:,} tokens of {record['text']})."
        )
    if record["untied_head"]:
        notes.append(
            f"The head, which was tied to the embedding, is a matrix of its own: {size(record['untied_head'])} more."
        )
    return notes


_KINDS = {
    "hadamard": "Hadamard matrices within groups of channels",
    "missing": "first the directions of what shards miss",
}
