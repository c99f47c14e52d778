"""What loading a checkpoint raises, as a sentence: a broken file makes loaders raise anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading(failure: str) -> Iterator[None]:
    """Raises ValueError for whatever is raised inside: what `failure` says, and the reason."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{failure}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first line of its message, and the second where the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return reason if reason and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {reason}"
