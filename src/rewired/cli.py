"""The front door: `rewired COMMAND`, and how every command speaks of errors. Commands live in their own rooms."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import typer

from .ranks import RankError

ROOMS = (
    "rewired.adapt.cli",
    "rewired.convert.cli",
    "rewired.select.cli",
    "rewired.evaluate.cli",
    "rewired.serve.cli",
    "rewired.data",
)  # each adds its own commands


def main() -> None:
    """Console script `rewired`."""
    app = new_app(no_args_is_help=True)
    app.callback()(_umbrella)
    for room in ROOMS:
        import_module(room).add_commands(app)
    app()


def new_app(no_args_is_help: bool = False) -> typer.Typer:
    """A command line in the project's style."""
    return typer.Typer(
        rich_markup_mode="markdown",
        no_args_is_help=no_args_is_help,
        add_completion=False,
        pretty_exceptions_enable=False,
    )


def _umbrella() -> None:
    """Llama checkpoints whose tensor-parallel all-reduces overlap with compute, shrink, or vanish."""


@contextmanager
def sentences(command: str, when_interrupted: str = "interrupted.") -> Iterator[None]:
    """What goes wrong, as one sentence on stderr.

    Exit status 2 for what a user got wrong or the disk refuses, 1 for a rank that failed, 130 for Ctrl-C.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up as for Ctrl-C
    try:
        yield
    except (ValueError, OSError) as error:
        _end(f"{command}: {error}", 2)
    except RankError as error:
        _end("\n".join([f"{command}: {error}", *getattr(error, "__notes__", [])]), 1)
    except KeyboardInterrupt:
        _end(f"{command}: {when_interrupted}", 130)


def _end(sentence: str, status: int) -> None:
    print(sentence, file=sys.stderr)
    raise typer.Exit(status) from None
