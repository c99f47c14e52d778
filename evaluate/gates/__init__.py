"""Gates: whether a model may stand for its original, by measures with their intervals. One YAML file a gate, under
`gates/`.

Each check passes, fails, or is undecided: where the interval of what was measured holds the bound, more items have to
say. A gate is passed where all checks are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewired.divergence import Divergence
from rewired.quantities import count

from ..named_yaml import read_yaml, refuse_unknown
from ..statistics import flips_error

if TYPE_CHECKING:
    from ..results import TaskResult

FOLDER = Path(__file__).parent
PASSED, FAILED, UNDECIDED, TOLD = "passed", "failed", "undecided", "not asked"
_TEXTS = ("about", "suite")
_Z = 1.96  # standard errors to each side of an interval of 95 %


@dataclass(frozen=True)
class Gate:
    """Bounds; None asks for nothing. Recovery is a model's score over the original's."""

    name: str
    about: str = ""
    suite: str | None = None  # whose tasks are asked, where none are named
    mean_recovery: float | None = None  # at least, of the mean over tasks
    task_recovery: float | None = None  # at least, of each task
    kl: float | None = None  # at most, nats a token, on each text
    retrieval_loss: float | None = None  # at most, of the share that is found again in long texts
    same_top: float | None = None  # at least, the share of tokens whose likeliest one is the original's, on each text

    @property
    def asks_tasks(self) -> bool:
        return self.mean_recovery is not None or self.task_recovery is not None

    @property
    def least(self) -> float | None:
        """The recovery that a task needs, or, where only the mean is asked for, all together."""
        return self.mean_recovery if self.task_recovery is None else self.task_recovery

    @property
    def asks_texts(self) -> bool:
        return self.kl is not None or self.same_top is not None


@dataclass(frozen=True)
class Check:
    """A measure beside its bound, None where none is asked. `error` is its standard error, None of a single item."""

    what: str
    value: float | None  # None where it could not be measured
    error: float | None
    bound: float | None
    at_least: bool = True
    items: int | None = None  # that it was measured on, where more would narrow its interval

    @property
    def interval(self) -> tuple[float, float]:
        half, value = _Z * (self.error or 0.0), self.value or 0.0
        return value - half, value + half

    @property
    def verdict(self) -> str:
        if self.bound is None:
            return TOLD
        low, high = self.interval
        if self.value is None or self.error is None or low < self.bound < high:
            return UNDECIDED
        return PASSED if (self.value >= self.bound if self.at_least else self.value <= self.bound) else FAILED

    @property
    def items_to_decide(self) -> int | None:
        """About how many items would decide, if the value stayed what it is."""
        if self.verdict != UNDECIDED or not self.items or self.value == self.bound:
            return None
        assert self.value is not None and self.bound is not None, "items were measured, and asked about"
        return math.ceil(self.items * (_Z * (self.error or 0.0) / (self.value - self.bound)) ** 2)


def load_gate(name: str) -> Gate:
    """A gate that comes with the package, by name, or any other, by the path of its YAML file. Raises ValueError."""
    path, content = read_yaml("gate", name, FOLDER)
    content = {key: _read(key, value) for key, value in content.items()} if isinstance(content, dict) else {}
    refuse_unknown(content, [each.name for each in fields(Gate) if each.name != "name"], f"The gate {path}")
    for key, value in content.items():
        is_share = key in ("same_top", "retrieval_loss")
        if key in _TEXTS:
            good, kind = isinstance(value, str), "text"
        else:
            good = type(value) in (int, float) and 0 <= value < math.inf and not (is_share and value > 1)
            kind = f"number from 0 {'to 1' if is_share else 'on'}"
        if not good:
            raise ValueError(f"The gate {path} has {key} '{value}': give a {kind}.")
    gate = Gate(path.stem, **content)
    if not (gate.asks_tasks or gate.asks_texts or gate.retrieval_loss is not None):
        raise ValueError(f"The gate {path} asks for nothing: give it a bound, such as mean_recovery: 0.99.")
    if gate.suite and not gate.asks_tasks:
        raise ValueError(f"The gate {path} has a suite, and asks nothing of tasks: give it a task_recovery, too.")
    return gate


def _read(key: str, value: Any) -> Any:
    """YAML takes 1e-3, without a point, for text."""
    try:
        return float(value) if key not in _TEXTS and isinstance(value, str) else value
    except ValueError:
        return value


def checks(
    gate: Gate,
    model: str,
    original: str,
    tasks: Sequence[TaskResult],
    divergences: Mapping[str, Mapping[str, Divergence]],
    retrieval: Sequence[TaskResult] = (),
    left_out: Collection[str] = (),
) -> list[Check]:
    """All that `gate` asks of a model; `divergences` are by text and model, `left_out` tasks that could not be run."""
    assert divergences or not gate.asks_texts, "a text is asked for at the start"
    assert retrieval or gate.retrieval_loss is None, "and so are lengths"
    judged = [task for task in tasks if task.is_score and task.scores[original].value > 0]
    found = list(_of_tasks(gate, model, original, judged))
    if gate.asks_tasks:
        found += _not_judged(gate, model, [task for task in tasks if task not in judged], left_out)
        found += [] if judged else [Check("recovery of any task", None, None, gate.least)]
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
    if not any(task.scores[original].value for task in retrieval):
        return Check("lost in retrieval, where the original finds nothing", loss, None, most, at_least=False)
    return Check("lost in retrieval", loss, flips_error(changed, loss, items), most, at_least=False, items=items)


def _of_tasks(gate: Gate, model: str, original: str, tasks: Sequence[TaskResult]) -> Iterator[Check]:
    recoveries = [_recovery(task, model, original) for task in tasks]
    items = [task.scores[original].n for task in tasks]
    if gate.mean_recovery is not None and tasks:
        mean = sum(value for value, _ in recoveries) / len(recoveries)
        errors = [error for _, error in recoveries if error is not None]
        error = math.hypot(*errors) / len(errors) if len(errors) == len(recoveries) else None
        yield Check(f"mean recovery of {count(len(tasks), 'task')}", mean, error, gate.mean_recovery, items=sum(items))
    if gate.task_recovery is not None:
        for task, (value, of_task), asked in zip(tasks, recoveries, items, strict=True):
            yield Check(f"recovery of {task.title}", value, of_task, gate.task_recovery, items=asked)
    for task in tasks:
        flips = task.deltas[model].flips
        if flips is not None:
            yield Check(f"answers to {task.title} that change", flips, None, None)


def _not_judged(gate: Gate, model: str, tasks: Sequence[TaskResult], left_out: Collection[str]) -> Iterator[Check]:
    for task in tasks:
        if task.is_score:
            yield Check(f"recovery of {task.title}, where the original scores 0", None, None, gate.least)
        else:
            yield Check(f"{task.title}, whose score is no share", task.scores[model].value, None, None)
    for title in left_out:
        yield Check(f"recovery of {title}, which was not run", None, None, gate.least)


def _recovery(task: TaskResult, model: str, original: str) -> tuple[float, float | None]:
    """The error is the paired difference's, as if the original's score were known."""
    before, delta = task.scores[original], task.deltas[model]
    error = delta.standard_error
    if delta.flips is not None:
        error = flips_error(delta.flips, delta.value, before.n)
    elif error is not None and delta.changed is not None:
        error = max(error, flips_error(delta.changed, delta.value, before.n))
    return 1 + delta.value / before.value, None if error is None else error / before.value


def _of_text(gate: Gate, text: str, found: Divergence) -> Iterator[Check]:
    if gate.kl is not None:
        yield Check(f"KL on {text}", found.kl, found.kl_standard_error, gate.kl, at_least=False, items=found.tokens)
    if gate.same_top is not None:
        share, error = found.agreement[1], found.same_top_standard_error
        if error is not None:
            error = max(error, flips_error(1 - share, 1 - share, found.tokens))
        yield Check(f"same likeliest token on {text}", share, error, gate.same_top, items=found.tokens)


def verdict(found: Sequence[Check]) -> str:
    """Of a gate: failed where one check is, and undecided where one is and none failed."""
    verdicts = {check.verdict for check in found}
    return FAILED if FAILED in verdicts else UNDECIDED if UNDECIDED in verdicts else PASSED
