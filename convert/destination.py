"""The output folder: written beside its place and renamed into it, so that it is whole or not there."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rewired.cache import discard
from rewired.quantities import size

_LONGEST_NAME = 240  # bytes; most filesystems take 255, and the folder beside it has a few more


def check_free(out: Path, source: Path | None, force: bool) -> None:
    """Raise ValueError if `out` may not be written: it exists without `force`, or is or holds the source, or its name
    is too long."""
    if (length := len(os.fsencode(out.name))) > _LONGEST_NAME:
        raise ValueError(f"{out} has a name of {length} bytes: take one of at most {_LONGEST_NAME}.")
    if source is not None and (out.resolve() == source.resolve() or out.resolve() in source.resolve().parents):
        raise ValueError(f"{out} is, or holds, the source: choose another folder for the result.")
    if not (out.exists() or out.is_symlink()):
        parent = next(folder for folder in out.absolute().parents if folder.exists())
        if not parent.is_dir():
            raise ValueError(f"{parent} is a file: choose another folder for the result.")
        return
    if not force:
        raise ValueError(f"{out} exists: choose another name, or replace it with --force.")
    is_checkpoint = out.is_dir() and not out.is_symlink() and ((out / "config.json").exists() or not any(out.iterdir()))
    if not is_checkpoint:
        raise ValueError(f"{out} is not a checkpoint folder, and --force replaces nothing else: choose another name.")


def check_space(out: Path, needed: int) -> None:
    """Raise ValueError when `needed` bytes do not fit beside `out`."""
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ValueError(
            f"No space left: {out} needs {size(needed)} and {size(free)} are free. Free some space, or put it on the "
            "source's filesystem, where weights are linked instead of copied."
        )


def note_on_taken(out: Path, source: Path | None, force: bool) -> list[str]:
    """What `check_free` would say, as a note for a dry run."""
    try:
        check_free(out, source, force)
    except ValueError as error:
        return [str(error)]
    return []


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; renamed to `out` at the end, removed on any error.

    What a killed run left behind is removed first. Raises ValueError if another process is writing `out`.
    """
    missing_parents = [folder for folder in out.absolute().parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    staging, replaced = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.replaced")
    if staging.is_symlink():
        staging.unlink()
    staging.mkdir(exist_ok=True)
    lock = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (staging.exists() and os.path.samestat(os.fstat(lock), staging.stat())):  # its run has just moved it
            raise BlockingIOError
        for leftover in staging.iterdir():
            discard(leftover)
        yield staging
        _swap(staging, out, replaced)
    except BlockingIOError:
        raise ValueError(f"Another conversion is writing {out}: wait for it, or choose another name.") from None
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):  # somebody else may have put something there
            for folder in missing_parents:
                folder.rmdir()
        raise
    finally:
        os.close(lock)


def _swap(staging: Path, out: Path, replaced: Path) -> None:
    """Put `staging` in the place of `out`, which stays what it was if that fails.

    What a killed run moved to `replaced` is kept until the new checkpoint is in its place.
    """
    if out.exists():
        discard(replaced)
        out.rename(replaced)
        try:
            staging.rename(out)
        except BaseException:
            replaced.rename(out)
            raise
    else:
        staging.rename(out)
    discard(replaced)
