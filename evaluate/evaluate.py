"""Evaluate an original and what was made from it, on the same questions and the same text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

import rewired
from rewired.text.windows import windows_of

from . import alpaca_eval, answers, benchmarks, harness, measure
from .answers import Earlier, Logs
from .divergence import Divergence
from .harness import MissingRowsError, Task
from .measure import Machine, Question
from .models import Model, check_together, load_tokenizer, open_model
from .papers import load_paper
from .results import ModelInfo, Results, average_of, compile_tasks
from .suites import Suite, choose, load_suite

PACKAGED_TEXT = Path(__file__).parent / "texts" / "prose.txt"


@dataclass(frozen=True)
class Request:
    """What to compare, and on what. Models as users write them: a checkpoint, BASE+ADAPTER, or earlier results."""

    original: str
    others: Sequence[str] = ()
    control: str | None = None  # a dense model after the same training
    suite: str | None = None
    tasks: Sequence[str] = ()
    limit: int | None = None
    texts: Sequence[Path] = (PACKAGED_TEXT,)  # for perplexity and divergence
    text_tokens: int = 8192  # of each
    data: Path | None = None  # rows without a hub: the folder of `benchmarks.fetch`
    runs_code: bool = False  # whether tasks may run code that a model wrote
    fresh: bool = False  # whether kept answers are asked for again


def evaluate(request: Request, machine: Machine, out: Path) -> Results:
    """Ask all models what was not asked before, and compare them; per-item logs go below `out`, when all is done.

    Everything that can be checked is, before the first model loads. Raises ValueError.
    """
    suite = load_suite(request.suite) if request.suite else None
    tasks, left_out = _load_tasks(suite, request)
    models, roles = _open_models(request)
    texts = {path.name if path == PACKAGED_TEXT else str(path): _read_text(path) for path in request.texts}
    real = [model for model in models if isinstance(model, Model)]
    if real:
        _check_real(real, tasks, texts, request, machine)
        machine = machine.with_dtype_of(real[0].folder)
    settings = _settings(request, machine, real)
    logs = _ask(models, tasks, request, machine, settings)
    names = [model.name for model in models]
    results = compile_tasks(tasks, logs, names)
    divergences = {name: _divergences(models, text, request, machine) for name, text in texts.items()}
    answers.write_samples(out, logs)
    judged = next((logs[task.entry.title] for task in tasks if task.entry.task == alpaca_eval.TASK), {})
    return Results(
        suite=suite.name if suite else None,
        about=suite.about if suite else "",
        models=[_info(model, role) for model, role in zip(models, roles, strict=True)],
        tasks=results,
        average=average_of(results, names),
        divergences=divergences,
        left_out=left_out,
        notes=_notes(models, request) + _judge_alpaca_eval(judged, out),
        settings=settings,
        paper=load_paper(suite.paper) if suite and suite.paper else None,
    )


def _load_tasks(suite: Suite | None, request: Request) -> tuple[list[Task], dict[str, str]]:
    """The tasks, and those of the suite whose rows cannot be had, with the reason."""
    if request.data is not None:
        benchmarks.check(request.data)
    tasks, left_out = [], {}
    for entry in choose(suite, request.tasks, request.limit):
        try:
            tasks += harness.load_tasks([entry], request.data, request.runs_code)
        except MissingRowsError as error:
            if request.tasks or request.data is None:
                raise
            left_out[entry.title] = str(error)
            print(f"Left out: {error}", file=sys.stderr)
    return tasks, left_out


def _open_models(request: Request) -> tuple[list[Model | Earlier], list[str]]:
    given = [(request.original, "original"), *((other, "rewired") for other in request.others)]
    if request.control:
        given.append((request.control, "control"))
    models: list[Model | Earlier] = []
    roles: list[str] = []
    for name, role in given:
        if (Path(name) / "results.json").is_file():
            found: list[Model | Earlier] = [*answers.earlier(Path(name))]
            found = found[:1] if role == "original" else found[1:] or found
        else:
            found = [open_model(name)]
        models += found
        roles += [role] * len(found)
    names = [model.name for model in models]
    models = [model.under_its_path() if names.count(model.name) > 1 else model for model in models]
    names = [answers.as_file_name(model.name) for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"Two models are called {name}: rename a folder, so that the report can tell them apart.")
    return models, roles


def _check_real(
    models: Sequence[Model], tasks: Sequence[Task], texts: dict[str, str], request: Request, machine: Machine
) -> None:
    check_together(models, machine.ranks)
    tokenizer = load_tokenizer(models[0])
    for text in texts.values():
        windows_of(text, tokenizer, measure.WINDOW, request.text_tokens)
    titles = [task.entry.title for task in tasks if task.entry.chat]
    if titles and tokenizer.chat_template is None:
        raise ValueError(f"{titles[0]} asks through a chat template, and {models[0].name} has none.")


def _ask(
    models: Sequence[Model | Earlier],
    tasks: Sequence[Task],
    request: Request,
    machine: Machine,
    settings: dict[str, Any],
) -> dict[str, dict[str, Logs]]:
    """Each model's answers to each task, title -> model -> logs; those of earlier results are read first."""
    logs: dict[str, dict[str, Logs]] = {task.entry.title: {} for task in tasks}
    for model in models:
        if isinstance(model, Earlier):
            model.check_settings(settings)
            for title, of_task in logs.items():
                of_task[model.name] = model.logs(title)
    real = [model for model in models if isinstance(model, Model)]
    for model in real:
        questions = [Question(task.entry, answers.kept(model, task, settings)) for task in tasks]
        missing = [question for question in questions if request.fresh or not question.file.is_file()]
        if len(missing) < len(questions):
            done = len(questions) - len(missing)
            print(f"{model.name}: {done} of {len(questions)} tasks kept from before", file=sys.stderr)
        if missing:
            machine.run(measure.ask, model, real[0], missing, request.data, request.runs_code)
        for question in questions:
            logs[question.entry.title][model.name] = answers.read(question.file)
    return logs


def _divergences(
    models: Sequence[Model | Earlier], text: str, request: Request, machine: Machine
) -> dict[str, Divergence]:
    original, *others = models
    here = [model for model in others if isinstance(model, Model)]
    if not isinstance(original, Model) or not here:
        return {}
    found = machine.run(measure.compare, original, here, text, request.text_tokens)
    return dict(zip([model.name for model in here], found, strict=True))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The text {path} cannot be read: {error}.") from None


def _info(model: Model | Earlier, role: str) -> ModelInfo:
    config: dict[str, Any] = {}
    if isinstance(model, Model):
        loaded = AutoConfig.from_pretrained(model.folder).to_diff_dict()
        config = {key: loaded[key] for key in ("model_type", "wiring", "tp_shards") if key in loaded}
    return ModelInfo(model.name, role, model.sha256, model.step, config)


def _notes(models: Sequence[Model | Earlier], request: Request) -> list[str]:
    from_before = [model.name for model in models if isinstance(model, Earlier)]
    notes = [f"Answers of {', '.join(from_before)} are from earlier results."] if from_before else []
    if from_before and request.texts:
        notes.append("Divergence needs the weights of both models, so there is none for these.")
    return notes


def _judge_alpaca_eval(logs: dict[str, Logs], out: Path) -> list[str]:
    """The answers, written for AlpacaEval's own tool, and what it says of them."""
    notes = []
    for model, answered in logs.items():
        file = out / "alpaca_eval" / f"{answers.as_file_name(model)}.json"
        alpaca_eval.write_outputs(answered, model, file)
        notes.append(f"{model}: {alpaca_eval.judge(file)}")
    return notes


def _settings(request: Request, machine: Machine, models: Sequence[Model]) -> dict[str, Any]:
    """All that the answers depend on besides the model and the task, and what else was set."""
    return {
        "answers": {
            "dtype": machine.weights_dtype,
            "device": torch.cuda.get_device_name() if machine.device_type == "cuda" else "cpu",
            "rows": sorted(package.requirement for package in benchmarks.PACKAGES) if request.data else "hub",
            "tokenizer": models[0].tokenizer_sha256 if models else None,
            "seed": harness.SEED,
            "versions": {
                "rewired": f"{rewired.__version__}+{answers.code_sha256()[:12]}",
                "lm_eval": harness.HARNESS,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        },
        "limit": request.limit,
        "text_tokens": request.text_tokens,
        "window": measure.WINDOW,
        "batch_size": machine.batch_size,
        "tp": machine.ranks,
        "runs_code": request.runs_code,
    }
