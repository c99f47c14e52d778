"""Checkpoints of a training: which of them are whole, and which one to go on from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import PartialState
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

SAVING = ".saving"  # where checkpoints are written before they are moved into place
_RECORD = "adapt.json"  # the other files' sizes
_TORCHS = "inline_container"  # all that torch.save says of a disk


def resume_point(folder: Path) -> str | None:
    """The newest whole checkpoint in `folder`, if there is one. All ranks have to call this.

    Newer ones that are broken are removed, because save_total_limit would keep the newest. Raises ValueError if all are
    broken.
    """
    state = PartialState()
    last, broken = last_whole(folder)
    state.wait_for_everyone()  # all have looked
    if broken:
        state.print(f"{', '.join(broken)}: broken, so this goes on from {last}.")
    for checkpoint in broken if state.is_main_process else ():
        shutil.rmtree(checkpoint)
    return last


def remove_after(folder: Path, good: int) -> None:
    """Remove the checkpoints in `folder` from after step `good`. All ranks have to call this."""
    state = PartialState()
    for checkpoint in _newest_first(folder):
        if state.is_main_process and _step(checkpoint) > good:
            shutil.rmtree(checkpoint)
    state.wait_for_everyone()


def last_whole(folder: Path) -> tuple[str | None, list[str]]:
    """The newest whole checkpoint in `folder`, None if there is none, and newer ones that are broken.

    Raises ValueError if all are broken.
    """
    broken = list[str]()
    for checkpoint in _newest_first(folder):
        if _is_whole(checkpoint):
            return str(checkpoint), broken
        broken.append(str(checkpoint))
    if broken:
        raise ValueError(
            f"{folder} has no checkpoint that is whole: delete {', '.join(broken)}, and --resume begins anew."
        )
    return None, []


def newest_until(folder: Path, last: int) -> str | None:
    """The newest whole checkpoint in `folder` of step `last` or before it."""
    whole = (path for path in _newest_first(folder) if _step(path) <= last and _is_whole(path))
    return next(map(str, whole), None)


def record(checkpoint: Path) -> None:
    """Record that `checkpoint` is written completely."""
    (checkpoint / _RECORD).write_text(json.dumps({"files": _sizes(checkpoint)}, indent=1))


@contextmanager
def disk_errors(what: str, folder: Path) -> Iterator[None]:
    """Raises a ValueError of one sentence if the disk refuses `what`, written inside, of the run in `folder`."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        if not _is_of_a_disk(error):
            raise
        shutil.rmtree(folder / SAVING, ignore_errors=True)
        reason = "torch.save was cut short" if _TORCHS in str(error) else str(error).strip().splitlines()[-1]
        whole, _ = last_whole(folder)
        raise ValueError(
            f"{what} cannot be written ({reason}). Once the disk has room, the same command with --resume goes on from "
            f"{whole or 'the beginning'}."
        ) from None


def _is_of_a_disk(error: BaseException) -> bool:
    if isinstance(error, CheckpointException):
        return any(_is_of_a_disk(of_rank) for of_rank, _ in error.failures.values())
    return isinstance(error, OSError | SafetensorError) or _TORCHS in str(error)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=_step, reverse=True)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _is_whole(checkpoint: Path) -> bool:
    """Whether every file of `checkpoint` is there, in the size that it was saved in."""
    try:
        files = json.loads((checkpoint / _RECORD).read_text())["files"]
    except (OSError, ValueError):
        return False
    return not files.items() - _sizes(checkpoint).items()


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != _RECORD
    }
