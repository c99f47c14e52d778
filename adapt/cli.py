"""The command `adapt`: its arguments, progress and errors. All that it does is available from Python, too."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import Annotated

import typer

from rewired import signals
from rewired.cli import new_app, report_errors
from rewired.extras import needs
from rewired.progress import is_first_rank

from .recipe import packaged

_EXTRA = "adapt"
_ANY_KEY = {"allow_extra_args": True, "ignore_unknown_options": True}


def main() -> None:
    """Console script `adapt`."""
    app = new_app(add_completion=True)
    app.command(context_settings=_ANY_KEY)(_adapt)
    app()


def add_commands(app: typer.Typer) -> None:
    app.command("adapt", context_settings=_ANY_KEY)(_adapt)


def _list(is_asked: bool) -> None:
    if is_asked:
        recipes = packaged.descriptions()
        for name, description in recipes.items():
            print(f"{name:<{max(map(len, recipes))}}  {description}")
        raise typer.Exit


def _adapt(
    context: typer.Context,
    recipe: Annotated[
        Path,
        typer.Argument(
            help="A recipe: a YAML file, or the name of one that `--list` shows.",
            autocompletion=lambda: list(packaged.descriptions()),
        ),
    ],
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in the output_dir; with more --max_steps also beyond its end."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be trained, on how many tokens and in how much memory.")
    ] = False,
    _: Annotated[
        bool,
        typer.Option("--list", help="List the recipes that come with the package.", callback=_list, is_eager=True),
    ] = False,
) -> None:
    """Train a rewired model as a recipe says: SFT, distillation from the original, or both.

    `--key value` replaces any key of the recipe. Keys are those of TRL's SFTConfig, and ours, which recipes/README.md
    lists. If a recipe names a dense checkpoint and a wiring, adapt converts it first. The folder `final` of the
    output_dir gets the trained model.

    Examples:

    ```
    adapt --list
    adapt smollm2-135m-ladder-distill --max_steps 20
    adapt llama-3.1-8b-ladder-16l-sft --dry-run
    torchrun --nproc-per-node 8 -m rewired.adapt llama-3.1-8b-ladder-16l-distill --fsdp_size 8
    ```
    """
    with report_errors(
        "adapt", "interrupted; the last checkpoint is whole, and the same command continues with --resume."
    ):
        packaged.find(recipe)  # raises before anything that takes long to import
        with needs(_EXTRA, "adapt"):
            from .recipe.reading import read
            from .run import adapt
        stages = read(recipe, context.args)
        signals.check()
        # TRL and PEFT still call transformers' methods by these names
        warnings.filterwarnings("ignore", "`.*gradient_checkpointing.*` is deprecated", FutureWarning)
        # layers give out views of what stays local, which nothing writes to
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")

        if dry_run:
            from .dry_run import describe

            for number in range(1, len(stages) + 1) if is_first_rank() else ():
                title = f"stage {number} of {len(stages)}" if len(stages) > 1 else ""
                print(describe(stages[:number], title, resume))
            return
        model = adapt(stages, resume)
        if is_first_rank():
            from rewired.checkpoint import provenance
            from rewired.checkpoint.checkpoint import Checkpoint

            original = provenance.original(provenance.base_of(Checkpoint.open(model).config))
            compare = f" To compare it with the original: evaluate {shlex.quote(str(model))}" if original else ""
            print(f"{model} is trained.{compare}")
