"""The lock of a run: one process, and the ranks that it speaks for, writes to an output_dir at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

FILE = ".running"  # whose holder is locking it; what a killed run left behind is locked by nobody


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of `out`, a folder that is made if it is missing. All ranks have to call this.

    Raises ValueError, on all ranks, if another run holds it.
    """
    state = PartialState()
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    handle, holder = _take(out / FILE) if state.is_main_process else (None, None)
    if state.num_processes > 1:
        [holder] = broadcast_object_list([holder])
    if holder is not None:
        raise ValueError(f"{out} is being written by {holder}: wait for it to end, or choose another output_dir.")
    try:
        yield
    finally:
        if handle is not None:
            (out / FILE).unlink(missing_ok=True)
            os.close(handle)
            with suppress(OSError):  # what was written stays
                for folder in missing:
                    folder.rmdir()


def _take(file: Path) -> tuple[int | None, str | None]:
    """An open handle that holds the lock, or who else does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), file.stat()):
                os.truncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle, None
        except BlockingIOError:
            holder = os.read(handle, 1000).decode(errors="replace")
            os.close(handle)
            return None, holder or "another run"
        except FileNotFoundError:  # its holder has just ended
            pass
        os.close(handle)
