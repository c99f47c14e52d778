"""The console scripts. They start without the packages of any extra, to say in a sentence which one is missing."""

from __future__ import annotations

import sys
from importlib import import_module

from . import signals
from .extras import needs


def adapt() -> None:
    _run("adapt", "rewired.adapt.cli", extra="adapt")


def convert() -> None:
    _run("convert", "rewired.convert.cli", extra="convert")


def evaluate() -> None:
    _run("evaluate", "rewired.evaluate.cli", extra="evaluate")


def rewired() -> None:
    _run("rewired", "rewired.cli", extra="convert")


def _run(command: str, module: str, extra: str) -> None:
    signals.end_at_once(command)
    try:
        with needs(extra, command):
            import_module(module).main()
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
