"""The commands `convert` and `rewired info`."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from rewired.checkpoint import tensors
from rewired.checkpoint.checkpoint import Checkpoint, check_loadable
from rewired.checkpoint.kv_heads import copies_in, note_on_copies
from rewired.checkpoint.provenance import AGAIN
from rewired.checkpoint.quantised import schemes
from rewired.cli import Command, new_app, option, report_errors
from rewired.measured_kl import smollm2_kl
from rewired.progress import Bars
from rewired.quantities import count
from rewired.rotate.request import RECORD
from rewired.sources import checkpoint_folder, find_source
from rewired.text import MIX

from .convert import Conversion, convert
from .plan import note_on_shards
from .refit import notes_on_making
from .request import Request, refit_request, regions_of
from .rotation import notes_on_rotation
from .traffic import LayerTable

_LAYERS_HELP = (
    "Layers are half-open ranges: `16-32` is layers 16 to 31, `16-` goes to the end, `-8` is the last eight, \
`0-4,8-12` is both, and `16-32:attn` or `16-32:mlp` is one module of each layer."
)

_INTERRUPTED = "interrupted; nothing half-written is left."
_GOES_ON = " Fitted layers are kept in .OUT.refit: the same command continues with them."


def main() -> None:
    """Console script `convert`."""
    app = new_app(add_completion=True)
    _add_convert(app)
    app()


def add_commands(app: typer.Typer) -> None:
    _add_convert(app)
    app.command("info")(_info)
    app.command("push")(_push_folder)


def _add_convert(app: typer.Typer) -> None:
    app.command("convert", epilog=_LAYERS_HELP, cls=_ConvertCommand)(_convert)


class _ConvertCommand(Command):
    """--refit and --calibrate may stand alone, which typer has no way to say."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given: list[str] = []
        for argument, following in zip_longest(args, args[1:], fillvalue="-"):
            given.append(argument)
            if argument in ("--refit", "--calibrate") and following.startswith("-"):
                given.append(MIX)
        return super().parse_args(ctx, given)


_which = partial(option, "Which layers, and how")
_fitting = partial(option, "Fit it to its wiring")
_writing = partial(option, "How to write it")


def _convert(
    *,
    source: Annotated[
        str, typer.Argument(help="A folder, a hub id, a short name (llama-3.1-8b, ...) or a .gguf file.")
    ],
    out: Annotated[
        str | None, typer.Argument(help="The folder to write; by default its name says what was done.")
    ] = None,
    wiring: Annotated[
        str | None,
        _which("Its text, such as `desync-4x@16-32`, or a YAML or JSON file that has it.", metavar="TEXT"),
    ] = None,
    ladder_layers: Annotated[
        str | None,
        _which("Each module reads a stream one update old; its all-reduce hides.", metavar="LAYERS"),
    ] = None,
    peek: Annotated[bool, _which("These also see what their own rank has not reduced yet.", "--peek")] = False,
    standard_layers: Annotated[
        str | None, _which("Back to dense: 0- for all of a rewired checkpoint.", metavar="LAYERS")
    ] = None,
    tp_shards: Annotated[
        int | None, _which("Logical shards; default 8, or the largest number below that divides.", metavar="R")
    ] = None,
    refit: Annotated[
        str | None,
        _fitting("Fit the rewired layers' weights by least squares on a text; see above.", metavar="TEXT"),
    ] = None,
    refit_tokens: Annotated[
        int | None,
        _fitting("How many tokens of the text, 32768 by default; one in eight is held out.", metavar="N"),
    ] = None,
    calibrate: Annotated[
        str | None, _fitting("Fit the gains of peeking modules, alone or before a refit.", metavar="TEXT")
    ] = None,
    rotate: Annotated[
        str | None,
        _fitting(
            "Another basis for the stream, free at inference: hadamard for quantised payloads, missing for channels "
            "that are not sent.",
            metavar="KIND",
        ),
    ] = None,
    retrain: Annotated[
        bool,
        _fitting(
            "Rewire weights that were trained or fitted to another wiring; the result needs training.", "--retrain"
        ),
    ] = False,
    dtype: Annotated[str | None, _writing("Also cast the weights: float32, bfloat16 or float16.")] = None,
    revision: Annotated[str | None, _writing("Branch, tag or commit of a hub SOURCE.")] = None,
    to_stock: Annotated[bool, _writing("Write a stock model; all layers must be standard.", "--to-stock")] = False,
    copy: Annotated[bool, _writing("Copy weight files instead of hard-linking them.", "--copy")] = False,
    force: Annotated[bool, _writing("Replace OUT if it is a checkpoint.", "--force")] = False,
    dry_run: Annotated[bool, _writing("Check everything, print the table, write nothing.", "--dry-run")] = False,
    push_to_hub: Annotated[
        str | None, _writing("Then upload OUT as this hub repository, private if new.", metavar="REPO")
    ] = None,
    as_json: Annotated[bool, _writing("Print the result as JSON.", "--json")] = False,
) -> None:
    """Rewire a Llama, Mistral, Qwen2 or Qwen3 checkpoint: which layers, and how they use all-reduces.

    The weights stay as they are, so it takes seconds and, within one filesystem, no disk space. Three options change
    them: --dtype casts them, --rotate writes them in another basis, and --refit fits them to their new wiring by least
    squares. --refit takes a text: a file, a folder or a dataset on the hub (owner/name). Without one, last or before
    another option, it takes a packaged mix of prose, chat and lists. The result loads with `AutoModelForCausalLM` after
    `import rewired`, or with `trust_remote_code=True`.

    Examples:

    ```
    convert llama-3.1-8b --ladder-layers 16-32
    convert ./my-llama my-hybrid --ladder-layers 16- --peek --refit
    convert llama-3.1-8b --wiring "desync-4x@8-24, ladder@24-32"
    convert llama-3.1-8b --wiring partial-0.5@-8
    convert my-hybrid my-dense --standard-layers 0- --to-stock
    ```
    """
    is_fitted = refit is not None or calibrate is not None
    with report_errors("convert", _INTERRUPTED + (_GOES_ON if is_fitted else "")):
        request = Request(
            wiring=regions_of(wiring, ladder_layers, peek, standard_layers),
            tp_shards=tp_shards,
            to_stock=to_stock,
            dtype=dtype,
            copy=copy,
            rotate=rotate,
            refit=refit_request(refit, calibrate, refit_tokens),
            retrain=retrain,
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        )
        with Bars() as bars:
            from .report import FitTable

            done = convert(
                source,
                out,
                request,
                revision=revision,
                dry_run=dry_run,
                force=force,
                on_bytes=partial(bars.show_bytes, "writing weights"),
                on_layer=FitTable(bars).add,
                on_cost=lambda cost: bars.print(cost.note()),
            )
        address = _push(done.out, push_to_hub) if push_to_hub and not dry_run else None
        _print_conversion(done, dry_run, as_json, address)


def _info(
    path: Annotated[str, typer.Argument(help="A checkpoint, rewired or not, named like convert's SOURCE.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub PATH.")] = None,
    check_weights: Annotated[
        bool,
        typer.Option("--check-weights", help="Read all weights, and refuse what is no finite number."),
    ] = False,
) -> None:
    """Print the layers of a checkpoint, rewired or not: their wiring, and what it costs in all-reduces."""
    with report_errors("rewired info"), TemporaryDirectory(prefix="rewired-") as scratch:
        checkpoint = Checkpoint.open(find_source(path, revision).preview(Path(scratch)))
        if check_weights:
            tensors.check_weights(Checkpoint.open(checkpoint_folder(path, revision)))
        table = LayerTable.of(checkpoint.wiring, checkpoint.shards(), checkpoint.dtype)
        if as_json:
            kinds = ("model_type", RECORD, "calibrated", "refit", "adapted", AGAIN)
            print(json.dumps({kind: checkpoint.config.get(kind) for kind in kinds} | table.to_json(), indent=2))
        else:
            from .report import print_table

            shards = [note_on_shards(checkpoint.wiring, table.tp_shards)] if checkpoint.is_rewired else []
            copies = copies_in(checkpoint)
            if copies > 1:
                shards.append(note_on_copies(checkpoint.shape, copies, table.tp_shards))
            if checkpoint.is_quantised:
                shards.append(f"The weights are quantised: {'; '.join(schemes(checkpoint.config))}.")
            notes = [*shards, *notes_on_rotation(checkpoint.config.get(RECORD)), *notes_on_making(checkpoint.config)]
            print_table(f"{path} ({checkpoint.config['model_type']})", table, notes)


def _push_folder(
    folder: Annotated[Path, typer.Argument(help="A checkpoint, as convert and adapt write it.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The hub repository, private if new: owner/name.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be uploaded, and upload nothing.")
    ] = False,
) -> None:
    """Upload a checkpoint folder to the hub, for example one whose conversion could not reach it."""
    with report_errors("rewired push"):
        check_loadable(folder)
        if not dry_run:
            print(f"pushed to {_push(folder, repo)}")
            return
        from rewired.sources.hub import files_to_push

        files = files_to_push(folder, repo)
        for name, size in files.items():
            print(f"{size:>15,}  {name}")
        print(f"would push {count(len(files), 'file')}, {sum(files.values()):,} bytes, to {repo}")


def _push(folder: Path, repo: str) -> str:
    from rewired.sources.hub import push

    try:
        return push(folder, repo)
    except (ValueError, KeyboardInterrupt) as error:
        command = shlex.join(["rewired", "push", str(folder), repo])
        way_on = f"{folder} is whole; to upload it later: {command}"
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ValueError
        raise kind(f"{str(error) or 'interrupted.'} {way_on}") from None


def _print_conversion(done: Conversion, dry_run: bool, as_json: bool, address: str | None) -> None:
    notes = [*done.plan.notes, *([done.plan.cost.note()] if dry_run and done.plan.cost else [])]
    if done.plan.is_damaged:
        notes.append(_note_on_damage(done))
    if as_json:
        report = {"out": str(done.out), "written": not dry_run, "pushed_to": address}
        print(json.dumps(report | done.plan.table.to_json() | {"notes": notes}, indent=2))
        return
    from .report import print_table

    print_table(f"would write {done.out}" if dry_run else f"wrote {done.out}", done.plan.table, notes)
    if address:
        print(f"pushed to {address}")


def _note_on_damage(done: Conversion) -> str:
    known = smollm2_kl(done.plan.wiring)
    figures = ""
    if known and known.converted and known.fitted:
        how = "interpolated" if known.is_interpolated else "measured"
        figures = (
            f" (on SmolLM2, {known.share:.0%} of the layers, {how}: KL {known.converted:.2g} nats a token now, "
            f"{known.fitted:.2g} after --refit)"
        )
    training = f"train it: adapt RECIPE --model {shlex.quote(str(done.out))}"
    if done.plan.is_quantised:
        way = "convert the original with --refit, or train it, and quantise the result"
    elif done.plan.is_changed:
        way = f"convert the original with --refit, or {training}"
    else:
        way = f"run convert with --refit too, or {training}"
    return f"The weights do not fit this wiring yet, and the model is damaged{figures}. To mend it, {way}."
