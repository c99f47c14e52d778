"""What is kept between runs: one folder of the user's, and folders in it that are made once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """$REWIRED_CACHE or, without it, `rewired` in the user's folder for caches; it need not exist yet."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("REWIRED_CACHE") or f"{caches}/rewired").expanduser()


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`; where it is missing, `make` fills a new one, which then takes its place: it is whole or not there."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        make(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and made the same
                raise
    return folder
