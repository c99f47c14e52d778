"""Signals that end a command, even where Python swallows what their handlers raise: in a callback of its garbage
collection, or of an import."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_received: int | None = None


def end_at_once(command: str) -> None:
    """Let Ctrl-C end `command`, which only imports so far: there is nothing to clean up."""
    sentence = f"{command}: interrupted.\n".encode()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as for what a script starts in the background
        signal.signal(signal.SIGINT, lambda *_: (os.write(2, sentence), os._exit(130)))


@contextmanager
def end_cleanly() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt meanwhile, and SIGTERM SystemExit, so that everything cleans up."""
    global _received
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        yield
        check()
    finally:
        _received = None
        for number, handler in handlers.items():
            signal.signal(number, handler)


def check() -> None:
    """Raise once more what a signal raised, if one came: it may have been swallowed."""
    if _received == signal.SIGINT:
        raise KeyboardInterrupt
    if _received is not None:
        sys.exit(128 + _received)


def _end(number: int, frame: FrameType | None) -> None:
    global _received
    _received = number
    check()
