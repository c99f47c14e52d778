"""The command `rewired generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewired.checkpoint.checkpoint import Checkpoint, read_json
from rewired.cli import report_errors
from rewired.families import family_of
from rewired.grid.size import TpSize
from rewired.ranks import check_device
from rewired.sources import checkpoint_folder


def add_commands(app: typer.Typer) -> None:
    app.command("generate")(_generate)


def _generate(
    source: Annotated[str, typer.Argument(help="A checkpoint, rewired or not, named like convert's SOURCE.")],
    prompt: Annotated[
        str | None,
        typer.Option(help="The text to answer or to continue. Without one, you chat: each line is a question."),
    ] = None,
    tp: Annotated[
        str,
        typer.Option(metavar="N", help="Ranks to split the model over, one GPU each; 2x2 is a grid of X x Y."),
    ] = "1",
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to generate.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="The seed of sampling.", min=0, max=2**32 - 1)] = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template; by default if the checkpoint has one."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: the checkpoint's.")] = "auto",
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
) -> None:
    """Continue a prompt, or chat, token by token, on one rank or many.

    It starts the ranks, one process each: NCCL on GPUs, gloo on a CPU. A rank that dies ends all of them.

    Examples:

    ```
    rewired generate llama-3.1-8b-ladder-16-32 --prompt "Why is the sky blue?" --tp 4
    rewired generate smollm2-135m
    rewired generate ./my-hybrid --prompt "Once upon a time" --no-chat --temperature 0.7
    ```
    """
    with report_errors("rewired generate"):
        size = TpSize.parse(tp, "--tp")
        _check(prompt, size, chat, dtype, temperature)
        check_device(device)
        folder = checkpoint_folder(source)
        if size > 1:
            _check_split(folder, size.x)  # before torch is loaded
        from .generate import Prompt, generate

        generate(folder, Prompt(prompt, max_new_tokens, temperature, seed, chat), size, dtype, device)


def _check(prompt: str | None, tp: int, chat: bool | None, dtype: str, temperature: float) -> None:
    if temperature and not 0.01 <= temperature <= 100:
        raise ValueError(f"--temperature {temperature:g} makes no sense: give 0, or a number from 0.01 to 100.")
    if prompt == "":
        raise ValueError("--prompt is empty: give some text to continue.")
    if prompt is None and chat is False:
        raise ValueError("--no-chat continues a text: give a --prompt.")
    if prompt is None and tp > 1:
        raise ValueError("A chat runs on one rank: give a --prompt, or leave --tp out.")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {dtype} is not known: choose auto, float32, bfloat16 or float16.")


def _check_split(folder: Path, ranks: int) -> None:
    """Raise ValueError if `ranks` ranks cannot hold equal parts of the model in `folder`; `generate` alone judges other
    families."""
    if family_of(read_json(folder / "config.json").get("model_type")):
        checkpoint = Checkpoint.open(folder)
        tp_shards = checkpoint.shards() if checkpoint.wiring.depends_on_shards else None
        checkpoint.shape.family.check_ranks(checkpoint.shape, ranks, tp_shards, "--tp")
