"""Real-time priority for gloo's threads, which over an emulated link stand for the engine of a network card."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from rewired.model import quantised_reduction

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def let_gloo_preempt() -> None:
    """Gloo's threads run as soon as a packet wakes them, whatever computes.

    Ordinary threads would wait for their turn at each of the four steps of an all-reduce. To be called when all groups
    are made and nothing has computed yet: then all threads but the first are those of groups and of their store.
    """
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) != os.getpid():
            _prefer(int(thread.name))
    quantised_reduction.post = _preferred(quantised_reduction.post)


def _preferred(post: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`post`, with the priority of gloo's threads.

    It holds locks that they try over and over. They would keep an ordinary thread from running, and so from giving
    these back, until the kernel stops them: up to a second.
    """

    @wraps(post)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        _prefer(0)
        try:
            return post(*args, **kwargs)
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    return run


def _prefer(thread: int) -> None:
    """Give a thread, this one where it is 0, real-time priority."""
    os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
