"""From logs to results: pairing of items, significance over all tasks, and the average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rewired.evaluate.harness import Task
from rewired.evaluate.metrics import Metric
from rewired.evaluate.results import average_of, compile_tasks
from rewired.evaluate.statistics import Delta, Score
from rewired.evaluate.suites import Entry

from .made_up_results import (
    MMLU,
    PERPLEXITY,
)

WORDS = Metric("word_perplexity", "perplexity", higher_is_better=False)


def loaded(title: str, metric: Metric, filter_name: str = "none", note: str = "") -> Task:
    return Task(Entry(f"{title}_task", column=title, limit=9), {}, metric, filter_name, 3, {title: 2.0}, note)


def log(item: int, metrics: dict[str, list[float]], filter_name: str = "none") -> dict[str, Any]:
    return {"id": f"t/{item}", "filter": filter_name, "metrics": metrics}


def right(items: Sequence[int], of: int = 20, filter_name: str = "none") -> list[dict[str, Any]]:
    return [log(item, {"acc": [float(item in items), 1.0]}, filter_name) for item in range(of)]


def test_results_come_from_items_that_pair_however_they_are_ordered() -> None:
    tasks = [loaded("A", Metric("acc", "mean"), note="differs")]
    logs = {"A": {"dense": right(range(10)), "hybrid": right([*range(5), 19])[::-1]}}
    [result] = compile_tasks(tasks, logs, ["dense", "hybrid"])
    assert (result.title, result.task, result.metric, result.shots, result.limit) == ("A", "A_task", "acc", 3, 9)
    assert (result.note, result.versions) == ("differs", {"A": 2.0})
    assert {name: score.value for name, score in result.scores.items()} == {"dense": 0.5, "hybrid": 0.3}
    assert result.deltas["hybrid"].value == pytest.approx(-0.2)
    assert result.deltas["hybrid"].p == pytest.approx(2 * 7 / 64), "5 lost, 1 gained"
    assert result.significant == {"hybrid": False}


def test_only_the_filter_that_is_asked_for_counts() -> None:
    tasks = [loaded("A", Metric("acc", "mean"), "strict-match")]
    logs = [*right(range(20), filter_name="flexible"), *right(range(5), filter_name="strict-match")]
    [result] = compile_tasks(tasks, {"A": {"dense": logs}}, ["dense"])
    assert (result.scores["dense"].value, result.scores["dense"].n) == (0.25, 20)
    assert result.metric == "acc,strict-match"


def test_verdicts_are_over_all_tasks_of_a_model_and_each_model_alone() -> None:
    """6 of 6 lost is p 0.03: enough for a task alone, not for one of two, but again where the other is certain."""
    tasks = [loaded(title, Metric("acc", "mean")) for title in "AB"]
    before, after, none = right(range(20)), right(range(6, 20)), right([])
    logs = {
        "A": {"dense": before, "hybrid": before, "tuned": none},
        "B": {"dense": before, "hybrid": after, "tuned": after},
    }
    alone = compile_tasks(tasks[1:], logs, ["dense", "hybrid"])
    assert [result.significant for result in alone] == [{"hybrid": True}]
    together = compile_tasks(tasks, logs, ["dense", "hybrid", "tuned"])
    assert [result.significant for result in together] == [{"hybrid": False, "tuned": True}] * 2
    logs["B"]["tuned"] = before
    together = compile_tasks(tasks, logs, ["dense", "hybrid", "tuned"])
    assert [result.significant["tuned"] for result in together] == [True, False], "each task has its own"


def test_the_average_is_over_shares_that_should_be_high() -> None:
    accuracies = [
        replace(
            MMLU,
            scores={"dense": Score(value, 0.03, 9), "hybrid": Score(value / 2, error, 9)},
            deltas={"hybrid": Delta(-value / 2, 0.01, 1.0)},
        )
        for value, error in ((0.4, 0.04), (0.8, None))
    ]
    lower = replace(MMLU, higher_is_better=False)
    average = average_of([*accuracies, lower, PERPLEXITY], ["dense", "hybrid"])
    assert average is not None
    assert average.tasks == 2
    assert average.values == pytest.approx({"dense": 0.6, "hybrid": 0.3})
    assert average.deltas == pytest.approx({"hybrid": -0.3})
    assert average.standard_errors == {"dense": pytest.approx(math.hypot(0.03, 0.03) / 2), "hybrid": None}
    assert average.delta_standard_errors == {"hybrid": pytest.approx(math.hypot(0.01, 0.01) / 2)}


def test_one_share_has_no_average() -> None:
    assert average_of([MMLU, PERPLEXITY], ["dense", "hybrid", "tuned"]) is None
