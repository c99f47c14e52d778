"""The lock of a folder that a long run writes to: one run at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

FILE = ".running"  # whose holder is locking it; what a killed run left behind is locked by nobody


@contextmanager
def held(folder: Path) -> Iterator[str | None]:
    """Hold the lock of `folder`, which is made if it is missing. Gives None, or who holds it, where that is another."""
    lock = FileLock(folder / FILE, blocking=False, on_acquired=_sign)
    missing = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
    holder = _take(lock, folder)
    try:
        yield holder
    finally:
        if holder is None:
            (folder / FILE).unlink(missing_ok=True)
            lock.release()
            with suppress(OSError):  # what was written stays
                for each in missing:
                    each.rmdir()


def _take(lock: FileLock, folder: Path) -> str | None:
    """Take `lock`, or say who else holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    while not lock.is_locked:
        with suppress(FileNotFoundError):  # its holder has just ended
            try:
                lock.acquire()
            except Timeout:
                return (folder / FILE).read_text(errors="replace") or "another run"
    return None


def _sign(handle: int) -> None:
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
