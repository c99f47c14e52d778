"""The command `evaluate`."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rewired.cli import new_app, option, positive_integers, report_errors
from rewired.extras import needs

from .names import as_file_name, names_of

OUR_FILES = {"results.json", "report.md", "samples"}
_INTERRUPTED = "interrupted; answers to finished tasks are kept, and the same command continues with the next."


def main() -> None:
    """Console script `evaluate`."""
    app = new_app(add_completion=True)
    app.command("evaluate")(_evaluate)
    app()


def add_commands(app: typer.Typer) -> None:
    app.command("evaluate")(_evaluate)


_on_what = partial(option, "On what")
_how = partial(option, "How")


def _evaluate(
    original: Annotated[
        str,
        typer.Argument(
            help="A folder, hub id, short name, .gguf file, or BASE+ADAPTER. A model that was trained "
            "or refitted may stand alone: it names its original."
        ),
    ],
    rewired: Annotated[list[str] | None, typer.Argument(help="The models to compare with it, named likewise.")] = None,
    control: Annotated[
        str | None, _on_what("A dense model after the same training; it gets a column of its own.", metavar="MODEL")
    ] = None,
    suite: Annotated[
        str | None, _on_what("quick, gate, ladder-table4, ladder-table3, caat-table1, or the path of a YAML file.")
    ] = None,
    tasks: Annotated[
        list[str] | None, _on_what("Only these tasks of the suite, or others of lm-eval's; commas or repeated.")
    ] = None,
    limit: Annotated[int | None, _on_what("Only the first N items of every task.", metavar="N")] = None,
    text: Annotated[
        list[Path] | None, _on_what("Texts for perplexity and divergence; by default a page of prose.", metavar="FILE")
    ] = None,
    no_text: Annotated[bool, _on_what("Leave perplexity and divergence out.", "--no-text")] = False,
    text_tokens: Annotated[int, _on_what("The first N tokens of each text, in whole windows.", metavar="N")] = 8192,
    window: Annotated[int, _on_what("Read texts in windows of so many tokens.", metavar="N")] = 512,
    retrieval: Annotated[
        str | None,
        _on_what(
            "Also ask for what stands in texts of so many tokens, as far as the original's context goes.",
            metavar="N,...",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        _on_what(
            "Take tasks' items from here, by `rewired data fetch benchmarks DIR`, and not from a hub.", metavar="DIR"
        ),
    ] = None,
    gate: Annotated[
        str | None,
        _on_what(
            "lossless, recommended, or the path of a YAML file: what the models have to pass. The exit status is 1 "
            "where one does not."
        ),
    ] = None,
    card: Annotated[
        bool, _on_what("Write what the gate finds on the README.md of each model, which is a folder.", "--card")
    ] = False,
    batch_size: Annotated[str, _how("A number, or auto: as many as fit; 16 to generate; 8 on a CPU.")] = "auto",
    dtype: Annotated[str, _how("float32, bfloat16, float16, or auto: the checkpoint's; float32 on a CPU.")] = "auto",
    device: Annotated[str, _how("cuda, cpu, or auto: cuda where there is one.")] = "auto",
    tp: Annotated[int, _how("The number of ranks to split each model over.", metavar="N")] = 1,
    engine: Annotated[
        str, _how("What runs the tasks, for all models: transformers, or vllm. Texts always run in transformers.")
    ] = "transformers",
    run_model_code: Annotated[
        bool, _how("Let tasks such as HumanEval run code that the model wrote, in a sandbox.", "--run-model-code")
    ] = False,
    fresh: Annotated[bool, _how("Run all tasks again and ignore cached answers.", "--fresh")] = False,
    out: Annotated[
        Path | None, _how("The folder to write; by default named after the models and the suite.", metavar="DIR")
    ] = None,
) -> None:
    """Compare models on the same tasks and the same text: accuracy, perplexity, divergence, and what is noise.

    The tasks are those of lm-evaluation-harness. Answers are cached, so that an interrupted run resumes and an
    original runs only once. Without a suite or tasks only the divergence is measured, which takes a minute.

    Examples:

    ```
    evaluate llama-3.1-8b-instruct ./my-hybrid --suite ladder-table4 --run-model-code
    evaluate llama-3.1-8b-instruct ./my-hybrid --text notes.txt
    evaluate ./my-trained-hybrid
    rewired data fetch benchmarks ./benchmarks
    evaluate ./my-llama ./my-hybrid --suite quick --data ./benchmarks
    evaluate ./my-llama ./my-hybrid --gate recommended --data ./benchmarks
    evaluate ./my-llama ./my-hybrid ./my-hybrid+./adapter --tasks arc_easy,piqa --limit 200
    ```
    """
    with report_errors("evaluate", _INTERRUPTED):
        _check(limit, text_tokens, window, batch_size, dtype, tp, engine)
        names = [name.strip() for given in tasks or () for name in given.split(",") if name.strip()]
        on_what = Path(suite).stem if suite else "tasks" if names else "retrieval" if no_text else "text"
        models = map(as_file_name, names_of([original, *(rewired or ())]))
        folder = out or Path("-".join(["evaluation", *models, on_what]))
        if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= OUR_FILES):
            raise ValueError(f"{folder} exists and is not an earlier evaluation: name another --out.")
        from rewired.ranks import choose_device

        with needs("evaluate", "Comparing models"):
            from .evaluate import PACKAGED_TEXT, EvaluateRequest, evaluate
            from .gates import PASSED, load_gate, verdict
            from .measure import Runner
            from .model_card import card_in, note_gate
            from .report import markdown, write_report
        if card and not gate:
            raise ValueError("--card writes what a gate finds: give --gate.")
        cards = [card_in(model) for model in rewired or [original]] if card else []
        texts = [] if no_text else text or [PACKAGED_TEXT]
        request = EvaluateRequest(
            original, rewired or [], control, suite, names, limit, texts, text_tokens, window, data, run_model_code,
            fresh,
            load_gate(gate) if gate else None,
            positive_integers("--retrieval", retrieval, "lengths") if retrieval else (),
        )  # fmt: skip
        runner = Runner(choose_device(device, tp), tp, dtype, batch_size, engine)
        results = evaluate(request, runner, folder)
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        write_report(results, command, date, folder)
        for path, name in zip(cards, results.checks, strict=False):  # a control's is not written
            note_gate(path, results, name, command, date)
        _print(markdown(results, command, date))
        answers = ", and the answers to each item" if suite or names else ""
        print(f"wrote {folder / 'report.md'} and results.json{answers}")
        judged = [model.name for model in results.models if model.role == "rewired"]  # a control only shows
        if results.checks and any(verdict(results.checks[name]) != PASSED for name in judged):
            raise typer.Exit(1)


def _print(text: str) -> None:
    """A report on the terminal: sentences in its width, and tables in their own, so that no name is cut."""
    from rich.console import Console
    from rich.markdown import Markdown

    for block in text.split("\n\n"):
        console = Console()
        if block.startswith("|"):
            columns = zip(*(line.split("|") for line in block.splitlines()), strict=True)
            console.width = max(console.width, sum(max(map(len, cells)) + 1 for cells in columns))
        console.print(Markdown(block))
        console.print()


def _check(limit: int | None, text_tokens: int, window: int, batch_size: str, dtype: str, tp: int, engine: str) -> None:
    numbers = {"--limit": (limit, 1), "--text-tokens": (text_tokens, 1), "--window": (window, 2), "--tp": (tp, 1)}
    for name, (value, least) in numbers.items():
        if value is not None and value < least:
            raise ValueError(f"{name} {value} makes no sense: give a number from {least} on.")
    if batch_size != "auto" and not (batch_size.isdigit() and int(batch_size) > 0):
        raise ValueError(f"--batch-size {batch_size} makes no sense: give a number from 1 on, or auto.")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {dtype} is not known: choose auto, float32, bfloat16 or float16.")
    if engine not in ("transformers", "vllm"):
        raise ValueError(f"--engine {engine} is not known: choose transformers or vllm.")
