"""A rotation as it is asked for; without torch, so that a bad request is refused before anything heavy is imported."""

from __future__ import annotations

KINDS = ("hadamard", "missing")

TOKENS = 16_384  # of text, on which is found what shards miss
RECORD = "rotation"  # the key of a rotated checkpoint's config for the record of it
BASIS_FILE = "rotation.npy"  # beside its weights: R, [H, H]


def check_kind(name: str) -> None:
    """Raise ValueError for an unknown rotation."""
    if name not in KINDS:
        raise ValueError(f"'{name}' is not a rotation: choose one of {', '.join(KINDS)}.")
