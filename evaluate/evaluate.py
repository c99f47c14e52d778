"""The evaluation of an original model and of models made from it, on the same tasks and the same text."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

import rewired
from rewired.loading import loading
from rewired.quantities import count
from rewired.text.tokenizer import load_tokenizer, templated
from rewired.text.windows import windows_of
from rewired.vllm_start import vllm_version

from . import answers, benchmarks, harness, measure, retrieval, vllm_engine
from .answers import Logs
from .gates import Gate, checks
from .harness import MissingRowsError, Task
from .measure import VLLM, Runner
from .models import Model, check_together, open_model, original_of
from .names import as_file_name, names_of
from .results import ModelInfo, Results, average_of, compile_tasks
from .suites import Suite, choose, load_suite

PACKAGED_TEXT = Path(__file__).parent / "texts" / "prose.txt"
_WITHOUT_VLLM = "Perplexity and divergence need all logits, and ran in transformers, not in vLLM."


@dataclass(frozen=True)
class EvaluateRequest:
    """The models to compare and the tasks and texts to compare them on.

    Models are named as on the command line: a checkpoint, or BASE+ADAPTER.
    """

    original: str
    others: Sequence[str] = ()
    control: str | None = None  # a dense model after the same training
    suite: str | None = None
    tasks: Sequence[str] = ()
    limit: int | None = None
    texts: Sequence[Path] = (PACKAGED_TEXT,)  # for perplexity and divergence
    text_tokens: int = 8192  # of each
    window: int = 512  # tokens that a text is read in at a time
    data: Path | None = None  # the folder that `benchmarks.fetch` filled; None takes rows from the hub
    runs_code: bool = False  # whether tasks may run code that a model wrote
    fresh: bool = False  # run all tasks, cached answers or not
    gate: Gate | None = None  # what the models have to pass
    retrieval: Sequence[int] = ()  # lengths of texts in which something is to be found again


def evaluate(request: EvaluateRequest, runner: Runner, out: Path) -> Results:
    """Run the tasks whose answers are not cached, and compare the models; per-item logs are written below `out`.

    Everything that can be checked is checked before the first model is loaded. Raises ValueError.
    """
    request = _with_what_the_gate_asks(_with_original(request))
    suite = load_suite(request.suite) if request.suite else None
    tasks, left_out = _load_tasks(suite, request)
    _check_what_runs(tasks, left_out, request)
    models, roles = _open_models(request)
    texts = {path.name if path == PACKAGED_TEXT else str(path): _read_text(path) for path in request.texts}
    _check(models, tasks, texts, request, runner.ranks)
    lengths = _lengths(models[0], request.retrieval)
    runner = runner.with_dtype_of(models[0].folder)
    settings = _settings(request, runner, models[0])
    if runner.engine == VLLM and tasks:
        vllm_engine.check(models, runner.device_type, runner.dtype, runner.ranks)
    names = [model.name for model in models]
    logs = _collect_logs(models, tasks, request, runner, settings)
    results = compile_tasks(tasks, logs, names)
    windows = request.text_tokens, request.window
    divergences = {
        name: runner.run(measure.compare, models, text, *windows) for name, text in texts.items() if len(models) > 1
    }
    found_again = runner.run(measure.retrieve, models, lengths) if lengths else []
    answers.write_samples(out, logs)
    gate = request.gate
    passing = {
        name: checks(gate, name, names[0], results, divergences, found_again, left_out) for name in names[1:] if gate
    }
    return Results(
        suite=suite.name if suite else None,
        about=suite.about if suite else "",
        models=[_info(model, role) for model, role in zip(models, roles, strict=True)],
        tasks=results,
        average=average_of(results, names),
        divergences=divergences,
        retrieval=found_again,
        left_out=left_out,
        notes=[_WITHOUT_VLLM] if runner.engine == VLLM and texts else [],
        settings=settings,
        gate=gate.name if gate else None,
        checks=passing,
        paper=suite.paper if suite else None,
    )


def _with_original(request: EvaluateRequest) -> EvaluateRequest:
    """`request`, with the original that its only model names, for a gate or where only a divergence is measured."""
    needs_none = request.suite or request.tasks or (request.retrieval and not request.texts)
    if needs_none and not request.gate:
        return request
    if not (request.texts or request.gate):
        raise ValueError("Nothing would be measured: name --suite or --tasks, or leave out --no-text.")
    if request.others or request.control:
        return request
    name = request.original
    original = original_of(name)
    if original is None:
        raise ValueError(
            f"A {'gate' if request.gate else 'text'} compares a model with its original, and {name} names none: "
            f"evaluate ORIGINAL {name}. For the tasks of one model alone, give --suite or --tasks, and no --gate."
        )
    return replace(request, original=original, others=[name])


def _with_what_the_gate_asks(request: EvaluateRequest) -> EvaluateRequest:
    """`request`, with the gate's own suite and lengths where none are named. Raises ValueError for what is missing."""
    gate = request.gate
    if gate is None:
        return request
    if gate.asks_tasks and not request.suite:
        if not (gate.suite or request.tasks):
            raise ValueError(f"The gate {gate.name} asks for tasks: give --suite or --tasks, or a suite in its file.")
        request = replace(request, suite=gate.suite)
    if gate.asks_texts and not request.texts:
        raise ValueError(f"The gate {gate.name} asks for the divergence on a text: leave out --no-text.")
    if gate.retrieval_loss is None:
        return request
    return replace(request, retrieval=request.retrieval or retrieval.LENGTHS)


def _load_tasks(suite: Suite | None, request: EvaluateRequest) -> tuple[list[Task], dict[str, str]]:
    """The tasks, and those of the suite that are left out because their rows are missing, title -> the reason."""
    if request.data is not None:
        benchmarks.check(request.data)
    tasks, left_out = [], {}
    for entry in choose(suite, request.tasks, request.limit):
        try:
            tasks.append(harness.load_task(entry, request.data, request.runs_code))
        except MissingRowsError as error:
            if request.tasks or request.data is None:
                raise
            left_out[entry.title] = str(error)
            print(f"Left out: {error}", file=sys.stderr)
    return tasks, left_out


def _check_what_runs(tasks: Sequence[Task], left_out: Collection[str], request: EvaluateRequest) -> None:
    """Raise ValueError where nothing would be measured, or nothing that the gate can judge."""
    if not (tasks or request.texts or request.retrieval):
        raise ValueError(f"No task can be run ({', '.join(left_out)}): name others with --tasks.")
    if (
        request.gate
        and request.gate.asks_tasks
        and not any(task.metric.is_share and task.metric.higher_is_better for task in tasks)
    ):
        raise ValueError(
            f"The gate {request.gate.name} asks for tasks whose scores are shares: name some with --tasks."
        )


def _open_models(request: EvaluateRequest) -> tuple[list[Model], list[str]]:
    """The models, and each one's role: original, rewired or control."""
    given = [request.original, *request.others]
    roles = ["original", *["rewired"] * len(request.others)]
    if request.control:
        given.append(request.control)
        roles.append("control")
    models = [open_model(source, name) for source, name in zip(given, names_of(given), strict=True)]
    file_names = [as_file_name(model.name) for model in models]
    for name in file_names:
        if file_names.count(name) > 1:
            raise ValueError(f"Two models are called {name}: rename a folder, so that the report can tell them apart.")
    return models, roles


def _check(
    models: Sequence[Model], tasks: Sequence[Task], texts: dict[str, str], request: EvaluateRequest, ranks: int
) -> None:
    check_together(models, ranks)
    tokenizer = load_tokenizer(models[0].folder)
    longest = _context(models[0])
    for text in texts.values():
        if windows_of(text, tokenizer, request.window, request.text_tokens).shape[1] > longest:
            raise ValueError(f"{models[0].name} reads at most {longest:,} tokens: give a --window up to that.")
    if any(task.entry.chat for task in tasks):
        with loading(f"The chat template of {models[0].name} cannot be used"):
            templated([{"role": "user", "content": "Hello"}], tokenizer)


def _collect_logs(
    models: Sequence[Model],
    tasks: Sequence[Task],
    request: EvaluateRequest,
    runner: Runner,
    settings: dict[str, Any],
) -> dict[str, dict[str, Logs]]:
    """Each model's answers to each task, title -> model -> logs."""
    logs: dict[str, dict[str, Logs]] = {task.entry.title: {} for task in tasks}
    for model in models:
        files = {task.entry: answers.cache_file(model, task, settings) for task in tasks}
        known = {} if request.fresh else {task.entry: answers.known(files[task.entry], task) for task in tasks}
        pending = [entry for entry in files if known.get(entry) is None]
        if len(pending) < len(tasks):
            cached = len(tasks) - len(pending)
            print(f"{model.name}: {cached} of {count(len(tasks), 'task')} cached", file=sys.stderr)
        if pending:
            once = {files[entry]: entry for entry in pending}  # of two metrics of one task, the answers are the same
            runner.run(measure.run_tasks, model, models[0], once, request.data, request.runs_code)
        for entry, file in files.items():
            logs[entry.title][model.name] = known.get(entry) or answers.read(file)
    return logs


def _lengths(original: Model, asked: Sequence[int]) -> list[int]:
    """Those of the lengths `asked` for that the original's context holds.

    Raises ValueError where it holds none, or one has no room for what is to be found.
    """
    if not asked:
        return []
    longest = _context(original)
    lengths = [length for length in asked if length <= longest]
    if not lengths:
        raise ValueError(f"--retrieval: {original.name} reads at most {longest:,} tokens, so give a length up to that.")
    retrieval.items_of(load_tokenizer(original.folder), [min(lengths)])
    return lengths


def _context(model: Model) -> int:
    """How many tokens it reads."""
    longest: int = AutoConfig.from_pretrained(model.folder, trust_remote_code=False).max_position_embeddings
    return longest


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The text {path} cannot be read: {error}.") from None


def _info(model: Model, role: str) -> ModelInfo:
    loaded = AutoConfig.from_pretrained(model.folder, trust_remote_code=False).to_diff_dict()
    config = {key: loaded[key] for key in ("model_type", "wiring", "tp_shards") if key in loaded}
    return ModelInfo(model.name, role, model.sha256, config)


def _settings(request: EvaluateRequest, runner: Runner, original: Model) -> dict[str, Any]:
    """All settings; under `answers`, those that answers depend on besides the model and the task.

    Raises ValueError where the engine is not installed.
    """
    versions = {
        "rewired": rewired.__version__,
        "its code": f"SHA-256 {answers.code_sha256()[:12]}",
        "lm_eval": harness.HARNESS,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if runner.engine == VLLM:
        versions["vllm"] = vllm_version()
    return {
        "answers": {
            "engine": runner.engine,
            "dtype": runner.dtype,
            "device": torch.cuda.get_device_name() if runner.device_type == "cuda" else "cpu",
            "rows": sorted(package.requirement for package in benchmarks.PACKAGES) if request.data else "hub",
            "tokenizer": original.tokenizer_sha256,
            "seed": harness.SEED,
            "batch_size": runner.batch_size,
            "tp": runner.ranks,
            "versions": versions,
        },
        "limit": request.limit,
        "text_tokens": request.text_tokens,
        "window": request.window,
        "runs_code": request.runs_code,
    }
