"""What a gate asks of a model, checked against what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rewired.divergence import Divergence
from rewired.quantities import count

from .gates import Check, Gate
from .results import TaskResult
from .statistics import flips_error

ByText = Mapping[str, Mapping[str, Divergence]]  # by model


def checks(
    gate: Gate,
    model: str,
    original: str,
    tasks: Sequence[TaskResult],
    divergences: ByText,
    retrieval: Sequence[TaskResult] = (),
) -> list[Check]:
    """All that `gate` asks of a model. Raises ValueError where no task's score is a share."""
    shares = [task for task in tasks if task.is_share and task.higher_is_better and task.scores[original].value > 0]
    if gate.asks_tasks and not shares:
        raise ValueError(f"The gate {gate.name} asks for tasks whose scores are shares: give --suite or --tasks.")
    assert divergences or not gate.asks_texts, "a text is asked for at the start"
    assert retrieval or gate.retrieval_loss is None, "and so are lengths"
    found = list(_of_tasks(gate, model, original, shares))
    for text, by_model in divergences.items():
        found += _of_text(gate, text, by_model[model])
    if gate.retrieval_loss is not None:
        found.append(_lost(gate.retrieval_loss, retrieval, model, original))
    return found


def _lost(most: float, retrieval: Sequence[TaskResult], model: str, original: str) -> Check:
    """Of all that is to be found again, at all lengths together."""
    found = [(task.scores[original].n, task.deltas[model]) for task in retrieval]
    items = sum(asked for asked, _ in found)
    loss = sum(asked * (0.0 - delta.value) for asked, delta in found) / items
    changed = sum(asked * (delta.flips or 0.0) for asked, delta in found) / items
    return Check("lost in retrieval", loss, flips_error(changed, loss, items), most, at_least=False, items=items)


def _of_tasks(gate: Gate, model: str, original: str, tasks: Sequence[TaskResult]) -> Iterator[Check]:
    recoveries = [_recovery(task, model, original) for task in tasks]
    items = [task.scores[original].n for task in tasks]
    if gate.mean_recovery is not None:
        mean = sum(value for value, _ in recoveries) / len(recoveries)
        error = math.hypot(*(each or 0.0 for _, each in recoveries)) / len(recoveries)
        yield Check(f"mean recovery of {count(len(tasks), 'task')}", mean, error, gate.mean_recovery, items=sum(items))
    if gate.task_recovery is not None:
        for task, (value, of_task), asked in zip(tasks, recoveries, items, strict=True):
            yield Check(f"recovery of {task.title}", value, of_task, gate.task_recovery, items=asked)
    for task in tasks:
        flips = task.deltas[model].flips
        if flips is not None:
            yield Check(f"answers to {task.title} that change", flips, None, None)


def _recovery(task: TaskResult, model: str, original: str) -> tuple[float, float | None]:
    """The error is the paired difference's, as if the original's score were known."""
    before, delta = task.scores[original], task.deltas[model]
    error = delta.standard_error if delta.flips is None else flips_error(delta.flips, delta.value, before.n)
    return 1 + delta.value / before.value, None if error is None else error / before.value


def _of_text(gate: Gate, text: str, found: Divergence) -> Iterator[Check]:
    if gate.kl is not None:
        yield Check(f"KL on {text}", found.kl, found.kl_standard_error, gate.kl, at_least=False, items=found.tokens)
    if gate.same_top is not None:
        share = found.agreement[1]
        error = math.sqrt(share * (1 - share) / found.tokens)
        yield Check(f"same likeliest token on {text}", share, error, gate.same_top, items=found.tokens)
