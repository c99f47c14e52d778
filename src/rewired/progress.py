"""Progress of what takes long, on stderr: a bar where that is a terminal, and lines now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from rewired.quantities import duration, size

_EVERY = 30.0  # seconds between two lines
_LONG = 5.0  # seconds after which the first one comes


def announce(sentence: str) -> None:
    """Print what begins, on the first rank."""
    if is_first_rank():
        print(sentence, file=sys.stderr, flush=True)


class Bars:
    """A bar for each work that is shown, from the first one on, and lines above them. Elsewhere than on a terminal, a
    line now and then, and none on what is done within seconds."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
        console = Console(stderr=True, markup=False)
        self.progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self.tasks: dict[str, Any] = {}
        self.began: dict[str, float] = {}  # when each work did
        self.last = time.monotonic()
        self.told = self.last + _LONG - _EVERY

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self.tasks:
            self.progress.stop()

    @property
    def is_terminal(self) -> bool:
        return is_first_rank() and self.progress.console.is_terminal

    def show(self, what: str, done: int, total: int) -> None:
        """So many parts are done of a work."""
        self._update(what, f"{done}/{total}", total=total, completed=done)
        began, now = self.began.setdefault(what, self.last), time.monotonic()
        self.last = now
        if not self.is_terminal and done and now >= self.told + _EVERY:
            self.told, left = now, (now - began) / done * (total - done)
            rest = f"about {duration(left)} left" if done < total else f"after {duration(now - began)}"
            announce(f"{what} {done} of {total}, {rest}")

    def show_bytes(self, what: str, count: int, total: int) -> None:
        """So many bytes more of `total` are done; after the last one, another such work begins."""
        task = self.progress.tasks[self.tasks[what]] if what in self.tasks else None
        done = count if task is None or task.finished else int(task.completed) + count
        self._update(what, f"{size(done)} of {size(total)}", total=total, completed=done)

    def print(self, line: str) -> None:
        self.progress.console.print(line, soft_wrap=True, highlight=False)

    def _update(self, what: str, amount: str, **changes: Any) -> None:
        if not self.is_terminal:
            return
        if not self.tasks:
            self.progress.start()
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(what, total=None, amount=amount)
        self.progress.update(self.tasks[what], amount=amount, **changes)


class Progress(Bars):
    """`total` parts of one work, told as they are done: `with Progress("held-out row", 30) as progress`."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__()
        self.what, self.total, self.done = what, total, 0

    def __enter__(self) -> Progress:
        self.show(self.what, 0, self.total)
        return self

    def advance(self) -> None:
        """One part more is done."""
        self.done += 1
        self.show(self.what, self.done, self.total)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
