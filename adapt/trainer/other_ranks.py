"""The other ranks of a training: how long one waits for them, and what it says if they do not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from accelerate import PartialState
from torch.distributed import DistError
from torch.distributed.distributed_c10d import _set_pg_timeout

from rewired.ranks import RankError


def wait_for(seconds: float) -> None:
    """Let this rank wait so long for the others from now on."""
    if PartialState().num_processes > 1:
        _set_pg_timeout(timedelta(seconds=seconds))


@contextmanager
def errors() -> Iterator[None]:
    """Raises RankError, in one sentence, where another rank does not answer in what is done inside."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, DistError) and "gloo" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0].rpartition("] ")[2]  # without a place in gloo's sources
        raise RankError(
            f"Another rank hangs or has ended ({reason}). Once all can run, the same "
            "command with --resume goes on from the last checkpoint; ddp_timeout is how many seconds a rank waits."
        ) from None
