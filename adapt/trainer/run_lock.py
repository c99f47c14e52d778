"""The lock of a training: one process, and the ranks that it speaks for, writes to an output_dir at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from rewired.run_lock import held


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of `out`, a folder that is made if it is missing. All ranks have to call this.

    Raises ValueError, on all ranks, if another run holds it.
    """
    state = PartialState()
    with held(out) if state.is_main_process else nullcontext() as holder:
        if state.num_processes > 1:
            [holder] = broadcast_object_list([holder])
        if holder:
            raise ValueError(f"{out} is being written by {holder}: wait for it to end, or choose another output_dir.")
        yield
