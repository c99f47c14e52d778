"""A rotation before and after it is done: what is refused, what the plan and config.json hold of it, and its notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.shape import AUTHORS_LADDER
from rewired.model.wiring import Wiring
from rewired.quantities import count, size
from rewired.refit.request import RefitRequest
from rewired.rotate.request import BASIS_FILE, TOKENS, check_kind

from .changed_weights import check_basis
from .request import Request


def plan_rotation(checkpoint: Checkpoint, request: Request, wiring: Wiring) -> dict[str, Any] | None:
    """What is known of the rotation that `request` asks for, as its record says it; None without one.

    Raises ValueError where it would do nothing, or where the weights fit the basis that they have.
    """
    if request.rotate is None:
        return None
    check_basis(checkpoint)
    if request.rotate == "missing":
        _check_misses(checkpoint, wiring)
    shape, item_bytes = checkpoint.shape, 4 if (request.dtype or checkpoint.dtype) == "float32" else 2
    head = shape.vocab_size * shape.hidden_size * item_bytes if shape.tie_word_embeddings else 0
    return {"kind": request.rotate, "untied_head": head}


def _check_misses(checkpoint: Checkpoint, wiring: Wiring) -> None:
    if not any(module.leaves_channels for module in wiring.modules):
        raise ValueError(
            "--rotate missing orders channels by what is missing where they are not sent, and this wiring sends all: "
            "take --rotate hadamard, or --partial-layers, or a payload with channels of 0 bits."
        )
    if checkpoint.config["model_type"] == AUTHORS_LADDER:
        raise ValueError(
            f"{checkpoint.folder} was trained as a ladder, so there is no dense original in which to see what is "
            "missing: take --rotate hadamard."
        )


def text_of(request: Request) -> RefitRequest | None:
    """The text that a rotation is found on, that of the refit if there is one; None where it needs none."""
    if request.rotate != "missing":
        return None
    text = request.refit or RefitRequest()
    return replace(text, tokens=min(text.tokens, TOKENS))


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
