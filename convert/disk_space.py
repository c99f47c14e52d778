"""Space on disk, checked before anything large is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from rewired.quantities import size


def check_space(out: Path, needed: int) -> None:
    """Raise ValueError when `needed` bytes do not fit beside `out`."""
    free = shutil.disk_usage(_existing_parent(out)).free
    if needed > free:
        raise ValueError(
            f"No space left: {out} needs {size(needed)} and {size(free)} are free. Free some space, or "
            "put it on the source's filesystem, where weights are linked instead of copied."
        )


def check_spill(folder: Path, needed: int) -> None:
    """Raise ValueError when activations of `needed` bytes do not fit into `folder`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"No space left: --spill {folder} needs {size(needed)} and {size(free)} are free. Spill to another "
            "disk, or fit on fewer tokens."
        )


def _existing_parent(out: Path) -> Path:
    return next(folder for folder in out.absolute().parents if folder.exists())
