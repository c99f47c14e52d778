"""The command `rewired select`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rewired.cli import report_errors
from rewired.measured_kl import smollm2_gates
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import wiring_text
from rewired.progress import Bars
from rewired.tables import new_table
from rewired.text import MIX

if TYPE_CHECKING:
    from .request import SelectRequest
    from .scores import LayerScore
    from .select import PricedChoice, Selection


def add_commands(app: typer.Typer) -> None:
    app.command("select")(_select)


def _select(
    source: Annotated[str, typer.Argument(help="A dense model, named like convert's SOURCE.")],
    wirings: Annotated[
        str,
        typer.Option(
            metavar="TEXT; ...",
            help="What layers may become: ladder+peek, say. Of several, or mix, each gets its best.",
        ),
    ] = "ladder",
    budget: Annotated[int | None, typer.Option(metavar="N", help="How many layers to rewire.")] = None,
    exposed: Annotated[
        int | None, typer.Option(metavar="N", help="Or: the most all-reduces that a token waits for.")
    ] = None,
    share: Annotated[
        float | None,
        typer.Option("--bytes", metavar="SHARE", help="Or: the largest share of the dense model's bytes."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The folder to write; by default its name says what was asked for."),
    ] = None,
    text: Annotated[
        str,
        typer.Option(help="The text to score on, like convert's --refit; by default a packaged mix."),
    ] = MIX,
    tokens: Annotated[
        int, typer.Option(metavar="N", help="How many tokens of the text; one in eight is held out.")
    ] = 16_384,
    tp_shards: Annotated[
        int | None,
        typer.Option(metavar="R", help="Logical shards; default 8, or the largest number below that divides."),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Refit the choice and the last layers at the same budget, and compare them.")
    ] = True,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub SOURCE.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be measured and how long it takes.")
    ] = False,
) -> None:
    """Choose the layers that cost least to rewire, each measured after a refit of it alone.

    DIR gets the scores, the choice (selection.json), and wiring.json for `convert --wiring`. The cache keeps
    scores, so another budget needs no second scoring.

    Examples:

    ```
    rewired select llama-3.1-8b --wirings ladder+peek --budget 16
    rewired select llama-3.1-8b --wirings "ladder; desync-2x" --exposed 20
    rewired select llama-3.1-8b --wirings mix --bytes 0.3
    convert llama-3.1-8b --wiring llama-3.1-8b-select-ladder-peek-16/wiring.json --refit
    ```
    """
    interrupted = "interrupted; scores are kept: the same command continues with them."
    with report_errors("rewired select", interrupted), Bars() as bars:
        from .request import SelectRequest
        from .select import estimate, select

        request = SelectRequest(wirings, budget, exposed, share, tp_shards, text, tokens, measure)
        if dry_run:
            print(estimate(source, request, revision=revision))
            return
        done = select(
            source,
            out,
            request,
            revision=revision,
            on_score=partial(_scored, bars),
            on_layer=lambda name, layer, layers: bars.show(f"refitting {name}", layer + 1, layers),
        )
    _print(done, request.names, _conversion(done, source, request, revision))


def _scored(bars: Bars, name: str, layer: int, layers: int, score: LayerScore) -> None:
    bars.show(f"scoring {name}", layer + 1, layers)
    pair = "" if score.pair is None else f", with the next one {score.pair:.4f}"
    bars.print(f"{name}, layer {layer}: KL {score.single:.4f}{pair}")


def _conversion(done: Selection, source: str, request: SelectRequest, revision: str | None) -> str:
    """The command that makes what was chosen."""
    command = ["convert", source, "--wiring", str(done.out / "wiring.json")]
    command += ["--revision", revision] if revision else []
    command += ["--tp-shards", str(done.tp_shards)] if request.tp_shards is not None else []
    command += ["--refit"] if request.text == MIX else ["--refit", request.text]
    return shlex.join([*command, "--refit-tokens", str(request.tokens)])


def _print(done: Selection, names: Sequence[str], command: str) -> None:
    from rich.console import Console

    console = Console(markup=False)
    grid = new_table("KL(original || only this layer rewired), refitted", ("layer", *names, "chosen"), words=0)
    scores = [done.cache.read(name) for name in names]
    for layer, own in enumerate(done.choice):
        singles = (f"{of_wiring[layer].single:.4f}" for of_wiring in scores)
        grid.add_row(str(layer), *singles, "" if own == "standard" else own)
    console.print(grid)
    headings = ("", "wiring", "waited for\na token", "bytes", "price", "KL\nconverted", "refitted")
    grid = new_table(None, headings, words=2)
    for each in done.candidates:
        wiring = Wiring.from_json(each.wiring, len(done.choice), hidden_size=1)
        name = "\n  SmolLM2 ".join([wiring_text(wiring.regions), *smollm2_gates(wiring)])
        grid.add_row(each.name, name, str(each.exposed), f"{each.bytes:.2f}", f"{each.price:.4f}", *_kls(each))
    console.print(grid)
    if len(done.candidates) == 1:
        console.print("These are the last layers, which the papers take, too.", highlight=False)
    chosen, last = done.candidates[0].measured, done.candidates[-1].measured
    if chosen and last and chosen.refitted > last.refitted:
        console.print(f"Measured, {done.candidates[-1].name} are better: score on more --tokens.", highlight=False)
    console.print(
        f"On {done.calibration.held_out_tokens:,} of {done.calibration.tokens:,} tokens, held out to choose each fit. "
        f"{done.out} holds the scores and the choice. To make it:\n    {command}",
        soft_wrap=True,
        highlight=False,
    )


def _kls(candidate: PricedChoice) -> tuple[str, str]:
    measured = candidate.measured
    if measured is None:
        return "", ""
    error = "" if measured.standard_error is None else f" ± {measured.standard_error:.4f}"
    return f"{measured.converted:.4f}", f"{measured.refitted:.4f}{error}"
