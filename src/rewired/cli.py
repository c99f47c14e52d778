"""The front door: `rewired COMMAND`, and how every command speaks of errors. Commands live in their own rooms."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

import typer

from .ranks import RankError


def main() -> None:
    """Console script `rewired`: the commands that rooms announce as entry points of the group `rewired.commands`."""
    app = new_app(no_args_is_help=True)
    app.callback()(_umbrella)
    announced = entry_points(group="rewired.commands")
    asked = [entry for entry in announced if entry.name in sys.argv[1:2]]  # that room alone is imported
    for entry in {entry.value: entry for entry in asked or announced}.values():
        entry.load()(app)
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
