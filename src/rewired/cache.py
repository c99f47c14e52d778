"""The cache: one folder of the user's, and folders in it that are made once; files written whole, and removed."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_SMALL = 2**24  # bytes that are hashed in no time
_DIGITS = 64  # of a SHA-256 in hex
_END = 2**16  # bytes at each end of a file that are always hashed


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


def digest(file: Path) -> str:
    """A file's SHA-256; a big one's computed once as long as it does not change, and once for all hard links to it.

    It has changed if its ends have, which is where a safetensors file says what it holds, or its times: also that of
    the last change of its inode, which nobody can set, as unpacking an archive sets the time of its content.
    """
    stat = file.stat()
    if stat.st_size < _SMALL:
        return sha256(file)
    with file.open("rb") as content:
        ends = hashlib.sha256(content.read(_END))
        content.seek(-min(_END, stat.st_size), os.SEEK_END)
        ends.update(content.read())
    times = f"{stat.st_mtime_ns}-{stat.st_ctime_ns}"
    known = cache_folder() / "digests" / f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{times}-{ends.hexdigest()[:16]}"
    if known.is_file() and len(kept := known.read_text()) == _DIGITS:  # else broken after a power cut
        return kept
    checksum = sha256(file)
    write_whole(known, checksum)
    return checksum


def write_whole(file: Path, text: str) -> None:
    """Write `file` and its folder: it is whole or as it was, also while others write it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as scratch:
        written = Path(scratch) / file.name
        written.write_text(text, encoding="utf-8")
        written.replace(file)


def discard(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256(file: Path) -> str:
    """Of a file, in hex."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
