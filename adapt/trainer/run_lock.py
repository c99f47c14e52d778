"""The lock of a run: one process, and the ranks that it speaks for, writes to an output_dir at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

FILE = ".running"  # whose holder is locking it; what a killed run left behind is locked by nobody


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of `out`, a folder that is made if it is missing. All ranks have to call this.

    Raises ValueError, on all ranks, if another run holds it.
    """
    state, lock = PartialState(), FileLock(out / FILE, blocking=False, on_acquired=_sign)
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    holder = _take(lock, out) if state.is_main_process else None
    if state.num_processes > 1:
        [holder] = broadcast_object_list([holder])
    if holder:
        raise ValueError(f"{out} is being written by {holder}: wait for it to end, or choose another output_dir.")
    try:
        yield
    finally:
        if state.is_main_process:
            (out / FILE).unlink(missing_ok=True)
            lock.release()
            with suppress(OSError):  # what was written stays
                for folder in missing:
                    folder.rmdir()


def _take(lock: FileLock, out: Path) -> str | None:
    """Take `lock`, or say who else holds it."""
    out.mkdir(parents=True, exist_ok=True)
    while not lock.is_locked:
        with suppress(FileNotFoundError):  # its holder has just ended
            try:
                lock.acquire()
            except Timeout:
                return (out / FILE).read_text(errors="replace") or "another run"
    return None


def _sign(handle: int) -> None:
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
