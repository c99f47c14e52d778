"""The cache of models' answers, one file a task: a killed evaluation resumes, and an original runs only once."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import rewired.model
from rewired.cache import cache_folder, write_whole

from .harness import Task
from .models import Model
from .names import as_file_name

Logs = list[dict[str, Any]]  # the harness's log of each item
_ASKING = (
    *("harness.py", "vllm_engine.py", "benchmarks.py", "metrics.py"),
    *("code_execution.py", "sandbox.py", "inside_sandbox.py"),
)


def cache_file(model: Model, task: Task, settings: dict[str, Any]) -> Path:
    """The file for a model's answers to a task, whether it exists or not; its name has a hash of all they depend on.

    That is the model, the task and the entry `answers` of an evaluation's `settings`.
    """
    entry = task.entry
    key = {
        "model": model.sha256,
        "task": entry.task,
        "shots": task.shots,
        "chat": entry.chat,
        "limit": entry.limit,
        "task_versions": task.versions,
        "items": task.items_sha256,
        **settings["answers"],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "answers" / f"{entry.task}-{digest[:24]}.jsonl"


@cache
def code_sha256() -> str:
    """Of `answering_code`: answers that other code gave are not reused."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in answering_code())).hexdigest()


def answering_code() -> list[Path]:
    """The files that answers depend on: the model's, and of this room those that build prompts and score."""
    room = Path(__file__).parent
    model = Path(rewired.model.__file__).parent
    return [*sorted(model.glob("*.py")), *(room / name for name in _ASKING)]


def read(file: Path) -> Logs:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def known(file: Path, task: Task) -> Logs | None:
    """The answers to `task` in `file`; None where it is missing or, as is said on stderr, does not hold all of them."""
    if not file.is_file():
        return None
    try:
        logs = read(file)
        for log in logs:
            if log["filter"] == task.filter:
                np.array(task.metric.parts(log["metrics"]), dtype=float).reshape(-1, 2)
        distinct = {(log["task"], log["filter"], log["id"]) for log in logs if log.keys() >= {"doc", "responses"}}
        if len(distinct) == len(logs) and Counter((of, filtered) for of, filtered, _ in distinct) == task.answers:
            return logs
        problem = f"{file} holds {len(distinct)} answers to {task.entry.task} and not {task.answers.total()}."
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        problem = f"{file} does not hold a model's answers to {task.entry.task}."
    print(f"{problem} It is measured anew.", file=sys.stderr)
    return None


def write(file: Path, logs: Logs) -> None:
    """Write the logs atomically: a reader never sees half a file."""
    write_whole(file, "".join(json.dumps(log, default=str, ensure_ascii=False) + "\n" for log in logs))


def sample_file(results: Path, model: str, title: str) -> Path:
    """The file with the per-item logs of a model and a task, below a folder of results."""
    return results / "samples" / as_file_name(model) / f"{as_file_name(title)}.jsonl"


def write_samples(results: Path, logs: dict[str, dict[str, Logs]]) -> None:
    """Write all per-item logs, title -> model -> logs, and delete those of an earlier evaluation."""
    shutil.rmtree(results / "samples", ignore_errors=True)
    for title, of_task in logs.items():
        for model, of_model in of_task.items():
            write(sample_file(results, model, title), of_model)


def paired(logs: Sequence[Logs], filter_name: str) -> list[Logs]:
    """Each model's logs of the same items in the same order."""
    by_id = [{log["id"]: log for log in of_model if log["filter"] == filter_name} for of_model in logs]
    assert all(items.keys() == by_id[0].keys() for items in by_id), "all were asked the same"
    return [[items[key] for key in by_id[0]] for items in by_id]
