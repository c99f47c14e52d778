"""Checkpoints of a training by the steps after which they were saved. Each that is in the folder is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from accelerate import PartialState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def remove_after(folder: Path, good: int) -> None:
    """Remove the checkpoints in `folder` from after step `good`. All ranks have to call this."""
    state = PartialState()
    for checkpoint in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if state.is_main_process and _step(checkpoint) > good:
            shutil.rmtree(checkpoint)
    state.wait_for_everyone()


def newest_until(folder: Path, last: int) -> str | None:
    """The newest checkpoint in `folder` of step `last` or before it."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _step(path) <= last]
    return str(max(found, key=_step)) if found else None


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
