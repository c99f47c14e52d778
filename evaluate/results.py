"""The results of an evaluation: the numbers in `results.json`, of which the report is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rewired.divergence import Divergence

from .answers import Logs, paired
from .gates import Check
from .harness import Task
from .statistics import Delta, Score, delta, score, significant
from .suites import Paper


@dataclass(frozen=True)
class ModelInfo:
    name: str
    role: str  # original, rewired or control
    sha256: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskResult:
    """One row of the report. `scores` has each model's; `deltas` that of each but the original."""

    title: str
    task: str
    metric: str
    scores: dict[str, Score]
    deltas: dict[str, Delta]
    significant: dict[str, bool] = field(default_factory=dict)
    is_share: bool = True
    higher_is_better: bool = True
    shots: int = 0
    chat: bool = False
    limit: int | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def is_score(self) -> bool:
        """Whether it is a share, of which more is better: it counts in averages, and a gate asks for its recovery."""
        return self.is_share and self.higher_is_better

    @property
    def scale(self) -> int:
        """From values to what reports print: shares in per cent."""
        return 100 if self.is_share else 1


@dataclass(frozen=True)
class Average:
    """The mean over the tasks that are shares, each counting alike; standard errors as of independent tasks."""

    tasks: int
    values: dict[str, float]
    standard_errors: dict[str, float | None]
    deltas: dict[str, float]
    delta_standard_errors: dict[str, float | None]


@dataclass(frozen=True)
class Results:
    suite: str | None
    about: str
    models: list[ModelInfo]  # the original first
    tasks: list[TaskResult]
    average: Average | None
    divergences: dict[str, dict[str, Divergence]]  # text -> model -> its divergence from the original
    left_out: dict[str, str]  # task -> why
    notes: list[str]
    settings: dict[str, Any]
    retrieval: list[TaskResult] = field(default_factory=list)  # by length of text
    gate: str | None = None
    checks: dict[str, list[Check]] = field(default_factory=dict)  # of the gate, by model
    paper: Paper | None = None

    @property
    def original(self) -> ModelInfo:
        return self.models[0]

    @property
    def others(self) -> list[ModelInfo]:
        return self.models[1:]


def compile_tasks(tasks: Sequence[Task], logs: dict[str, dict[str, Logs]], models: Sequence[str]) -> list[TaskResult]:
    """The tasks' results from each model's logs, title -> model -> logs."""
    results = [_compile_task(task, logs[task.entry.title], models) for task in tasks]
    for model in models[1:]:  # over all tasks of a model together, since among many comparisons some differ by chance
        verdicts = significant([result.deltas[model] for result in results])
        for result, verdict in zip(results, verdicts, strict=True):
            result.significant[model] = verdict
    return results


def average_of(tasks: Sequence[TaskResult], models: Sequence[str]) -> Average | None:
    shares = [task for task in tasks if task.is_score]
    if len(shares) < 2:
        return None
    others = models[1:]
    return Average(
        len(shares),
        {model: float(np.mean([task.scores[model].value for task in shares])) for model in models},
        {model: _error_of_mean([task.scores[model].standard_error for task in shares]) for model in models},
        {model: float(np.mean([task.deltas[model].value for task in shares])) for model in others},
        {model: _error_of_mean([task.deltas[model].standard_error for task in shares]) for model in others},
    )


def _compile_task(task: Task, logs: dict[str, Logs], models: Sequence[str]) -> TaskResult:
    entry, metric = task.entry, task.metric
    items = paired([logs[model] for model in models], task.filter)
    parts = {
        model: np.array([metric.parts(log["metrics"]) for log in of_model])  # [n, parts]
        for model, of_model in zip(models, items, strict=True)
    }
    return TaskResult(
        title=entry.title,
        task=entry.task,
        metric=metric.name if task.filter == "none" else f"{metric.name},{task.filter}",
        scores={model: score(metric, parts[model]) for model in models},
        deltas={model: delta(metric, parts[models[0]], parts[model]) for model in models[1:]},
        is_share=metric.is_share and all(map(_are_shares, parts.values())),
        higher_is_better=metric.higher_is_better,
        shots=task.shots,
        chat=entry.chat,
        limit=entry.limit,
        versions=task.versions,
        note=task.note,
    )


def _are_shares(parts: np.ndarray) -> bool:
    """Whether all values lie between 0 and 1; the means of some metrics, such as BLEU, do not."""
    return bool(((parts[:, 0::2] >= 0) & (parts[:, 0::2] <= parts[:, 1::2])).all())


def _error_of_mean(errors: Sequence[float | None]) -> float | None:
    return None if None in errors else float(np.linalg.norm(np.array(errors, dtype=float)) / len(errors))
