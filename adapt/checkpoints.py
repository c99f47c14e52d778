"""What a checkpoint has of ours, by which it is known to be whole."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

_RECORD = "adapt.json"  # the tokens that were trained on, and the other files' sizes


def last_whole(folder: Path) -> tuple[str | None, list[str]]:
    """The checkpoint in `folder` to go on from, None where there is none, and newer ones that are broken.

    Raises ValueError where all are broken.
    """
    found = sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=step, reverse=True)
    broken = list[str]()
    for checkpoint in found:
        if is_whole(checkpoint):
            return str(checkpoint), broken
        broken.append(str(checkpoint))
    if broken:
        raise ValueError(
            f"{folder} has no checkpoint that is whole: delete {', '.join(broken)}, and --resume begins anew."
        )
    return None, []


def newest_until(folder: Path, last: int) -> str | None:
    """The newest whole checkpoint in `folder` that is of step `last` or before it."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step(path) <= last and is_whole(path)]
    return str(max(found, key=step)) if found else None


def step(checkpoint: Path) -> int:
    """Whose weights it has."""
    return int(checkpoint.name.rpartition("-")[2])


def record(checkpoint: Path, tokens: int) -> None:
    """Say that all of `checkpoint` is written, after so many tokens."""
    (checkpoint / _RECORD).write_text(json.dumps({"tokens": tokens, "files": _sizes(checkpoint)}, indent=1))


def is_whole(checkpoint: Path) -> bool:
    """Whether each file is there, in the size that it was saved in."""
    try:
        files = json.loads((checkpoint / _RECORD).read_text())["files"]
    except (OSError, ValueError):
        return False
    return not files.items() - _sizes(checkpoint).items()


def tokens_seen(checkpoint: Path) -> int:
    """Before a whole one."""
    return int(json.loads((checkpoint / _RECORD).read_text())["tokens"])


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != _RECORD
    }
