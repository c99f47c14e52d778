"""The command `rewired select`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewired.cli import sentences

from .request import MIX

if TYPE_CHECKING:
    from .select import Selection


def add_commands(app: typer.Typer) -> None:
    app.command("select")(_select)


def _select(
    source: Annotated[str, typer.Argument(help="A dense Llama, as convert's SOURCE.")],
    wiring: Annotated[
        str,
        typer.Option(
            help="ladder, ladder-peek, parallel, parallel-overlap, desync-2x, spd (which is desync-2x), or mix: the "
            "best of several for each layer."
        ),
    ] = "ladder",
    budget: Annotated[int | None, typer.Option(metavar="N", help="How many layers to rewire.")] = None,
    exposed: Annotated[
        int | None, typer.Option(metavar="N", help="Or: how many all-reduces a token may wait for.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="The folder to write; by default its name says what was asked.")
    ] = None,
    text: Annotated[
        str, typer.Option(help="What to score on: as convert's --refit; by default a packaged mix of prose and chat.")
    ] = MIX,
    tokens: Annotated[int, typer.Option(metavar="N", help="How many tokens of it; one in eight only judges.")] = 16_384,
    tp_shards: Annotated[
        int | None, typer.Option(metavar="R", help="Logical shards; default 8, or the largest number below.")
    ] = None,
    spill: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep activations in files there, not in memory.")
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Refit the choice, and the last layers at the same budget, and compare.")
    ] = True,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub SOURCE.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier selection in DIR.")] = False,
) -> None:
    """Choose which layers to rewire: those that cost least, measured after a refit of each one alone.

    DIR gets the scores, a plot, the choice (selection.json), and wiring.json for `convert --wiring`. Scores are kept
    in the cache: another budget needs no second scoring.

    Examples:

    ```
    rewired select llama-3.1-8b --wiring ladder --budget 16
    rewired select llama-3.1-8b --wiring mix --exposed 20
    convert llama-3.1-8b --wiring llama-3.1-8b-select-ladder-16/wiring.json --refit
    ```
    """
    interrupted = "interrupted; layers that are scored are kept: the same command goes on with them."
    with sentences("rewired select", interrupted), _Progress() as progress:
        from .select import SelectRequest, select

        request = SelectRequest(wiring, budget, exposed, tp_shards, text, tokens, spill, measure)
        done = select(
            source,
            out,
            request,
            revision=revision,
            force=force,
            on_score=lambda name, layer, layers: progress.show(f"scoring {name}", layer, layers),
            on_layer=lambda name, layer, layers: progress.show(f"refitting: {name}", layer + 1, layers),
        )
    _print(done, source)


class _Progress:
    """On stderr, a bar for each thing that goes over the layers; from the first one on."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.tasks:
            self.progress.stop()

    def show(self, what: str, done: int, of: int) -> None:
        if not self.tasks:
            self.progress.start()
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(what, total=of)
        self.progress.update(self.tasks[what], completed=done)


def _print(done: Selection, source: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    grid = Table(title=f"{source}: KL(original || only this layer rewired), refitted", title_justify="left")
    for heading in ("layer", *done.names, "chosen"):
        grid.add_column(heading, justify="right")
    for layer, name in enumerate(done.choice):
        scores = (f"{done.scores.found[wiring][layer].single:.4f}" for wiring in done.names)
        grid.add_row(str(layer), *scores, "" if name == "standard" else name)
    console.print(grid)
    grid = Table("", "layers", "waited for\na token", "KL: sum of\nthe scores", "converted", "refitted")
    for each in done.candidates:
        layers = "; ".join(entry["layers"] for entry in each.wiring)
        measured = ("" if kl is None else f"{kl:.4f}" for kl in (each.converted, each.refitted))
        grid.add_row(each.name, layers, str(each.exposed), f"{each.predicted:.4f}", *measured)
    console.print(grid)
    command = shlex.join(["convert", source, "--wiring", str(done.out / "wiring.json"), "--refit"])
    console.print(f"{done.out} holds the scores, a plot and the choice. To make it: {command}", soft_wrap=True)
