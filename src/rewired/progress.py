"""Progress of what takes long, on stderr: a bar where that is a terminal, and lines now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any

_EVERY = 30.0  # seconds between two lines
_LONG = 5.0  # seconds after which the first one comes


def announce(sentence: str) -> None:
    """Print what begins, on the first rank."""
    if _is_first_rank():
        print(sentence, file=sys.stderr, flush=True)


class Progress:
    """`total` parts of a work, told as they are done: `with Progress("refit: layer", 30) as progress`.

    Elsewhere than on a terminal, nothing is told of a work that is done within seconds.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.bar: Any = None
        self.began = self.told = 0.0

    def __enter__(self) -> Progress:
        self.began = time.monotonic()
        self.told = self.began + _LONG - _EVERY
        if _is_first_rank() and sys.stderr.isatty():
            from tqdm.auto import tqdm

            self.bar = tqdm(desc=self.what, total=self.total, leave=False, dynamic_ncols=True)
        return self

    def advance(self) -> None:
        """One part more is done."""
        self.done += 1
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update()
        elif now >= self.told + _EVERY:
            self.told = now
            announce(f"{self.what} {self.done} of {self.total}, {self._rest(now - self.began)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def _rest(self, passed: float) -> str:
        left = passed / self.done * (self.total - self.done)
        return f"about {_duration(left)} left" if self.done < self.total else f"after {_duration(passed)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
