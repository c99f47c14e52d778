"""The front door: `rewired COMMAND`, and how every command speaks of errors. Commands live in their own rooms."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import __version__, signals
from .ranks import RankError


def main() -> None:
    """Console script `rewired`: the commands that rooms announce as entry points of the group `rewired.commands`."""
    app = new_app(no_args_is_help=True, add_completion=True)
    app.callback()(_umbrella)
    announced = entry_points(group="rewired.commands")
    asked = [entry for entry in announced if entry.name in sys.argv[1:2]]  # that room alone is imported
    for entry in {entry.value: entry for entry in asked or announced}.values():
        entry.load()(app)
    app()


def new_app(no_args_is_help: bool = False, add_completion: bool = False) -> typer.Typer:
    """A command line in the project's style; it draws no progress bars where stderr is no terminal."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # before anything heavy is imported
    return _App(
        cls=_Group,
        rich_markup_mode="markdown",
        no_args_is_help=no_args_is_help,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
    )


class _PlainFlags:
    """Shows flags in `--help` without the type of a value, since they take none."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command of ours; the class of every command of `new_app`'s."""


class _Group(_PlainFlags, TyperGroup):
    pass


class _App(typer.Typer):
    def command(self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **options: Any) -> Any:
        return super().command(name, cls=cls or Command, **options)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"rewired {__version__}")
        raise typer.Exit


def _umbrella(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Llama, Mistral, Qwen2 and Qwen3 models whose tensor-parallel all-reduces overlap, shrink, or vanish."""


def option(panel: str, help_text: str, *names: str, metavar: str | None = None) -> Any:
    """An option of a command, in the `panel` of that title in its help."""
    return typer.Option(*names, metavar=metavar, help=help_text, rich_help_panel=panel)


def positive_integers(flag: str, text: str, what: str) -> tuple[int, ...]:
    """Those of `1,16,64`, which `flag` takes as a list of `what`. Raises ValueError."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ValueError(f"{flag} {text} is not a list of {what}: give integers of at least 1, such as 1,16,64.")
    return values


@contextmanager
def report_errors(command: str, when_interrupted: str = "interrupted.") -> Iterator[None]:
    """What goes wrong, as one sentence on stderr.

    Exit status 2 for what a user got wrong or the disk refuses, 1 for a rank that failed, 130 for Ctrl-C.
    """
    # PEFT imports bitsandbytes, which recommends a package that fetches code, on CPUs with AVX-512
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        with signals.end_cleanly():
            _check_names()
            yield
    except (ValueError, OSError) as error:
        _end(f"{command}: {error}", 2)
    except RankError as error:
        _end("\n".join([f"{command}: {error}", *getattr(error, "__notes__", [])]), 1)
    except RuntimeError as error:
        if "Symlink loop" not in str(error):  # as Path.resolve says it before Python 3.13
            raise
        _end(f"{command}: {error}", 2)
    except KeyboardInterrupt as error:
        _end(f"{command}: {str(error) or when_interrupted}", 130)


def _check_names() -> None:
    """Raise ValueError for a name that no JSON or model card could hold."""
    for name in (*sys.argv[1:], str(Path.cwd())):
        if name.encode(errors="ignore").decode() != name:
            raise ValueError(f"{name!a} is not UTF-8, as the names of files and folders have to be.")


def _end(sentence: str, status: int) -> None:
    print(sentence, file=sys.stderr)
    raise typer.Exit(status) from None
