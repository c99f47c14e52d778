"""Metrics against the harness's own aggregations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api import metrics as harness

from rewired.evaluate.metrics import AGGREGATE, LOSS, Metric, metric_of, pair

from .harness_metrics import (
    BITS,
    IFEVAL,
    INST_LEVEL,
    PROMPT_LEVEL,
    WORD_PERPLEXITY,
    harness_value,
    ifeval_utils,
    parts_of,
)


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        (True, [1.0, 1.0]),
        (0, [0.0, 1.0]),
        (-3.5, [-3.5, 1.0]),
        (np.float64(0.25), [0.25, 1.0]),
        (np.float32(0.25), [0.25, 1.0]),
        (np.int64(1), [1.0, 1.0]),
        (np.bool_(True), [1.0, 1.0]),
        ([True, False, True], [2.0, 3.0]),
        ([1.0], [1.0, 1.0]),
        ((-120.5, 31), [-120.5, 31.0]),
    ],
)
def test_what_the_harness_logs_becomes_a_quotient(logged: Any, expected: list[float]) -> None:
    numbers = pair(logged)
    assert numbers == expected
    assert [type(number) for number in numbers or ()] == [float, float]


@pytest.mark.parametrize(
    "logged",
    [
        "text",
        None,
        {"id": 1},
        ["the reference", "the translation"],
        ("the reference", "the translation"),
        (2, np.array([0.1, 0.2, 0.7])),
        ([0, 1], 1),
        ({"id": "1"}, {"id": "1"}),
    ],
    ids=["text", "nothing", "a dict", "bleu's", "chrf's", "brier_score's", "f1's with several golds", "squad_v2's"],
)
def test_what_is_no_quotient_is_no_pair(logged: Any) -> None:
    """Translations are logged beside metrics that pair, and must not end a run after hours of asking."""
    assert pair(logged) is None


numbers = st.floats(-50, 50)
documents_logged = st.lists(st.tuples(st.floats(-900, -0.1), st.integers(1, 300)), min_size=1, max_size=12)


@given(st.lists(numbers, min_size=1, max_size=12))
def test_means_and_perplexities_are_the_harnesss(items: list[float]) -> None:
    sums = np.sum([pair(item) for item in items], axis=0)
    assert Metric("acc", "mean").value(sums) == pytest.approx(harness.mean(items), abs=1e-12)
    assert Metric("perplexity", "perplexity").value(sums) == pytest.approx(harness.perplexity(items))


@given(documents_logged)
def test_quotients_over_documents_are_the_harnesss(items: list[tuple[float, int]]) -> None:
    sums = np.sum([pair(item) for item in items], axis=0)
    assert BITS.value(sums) == pytest.approx(harness.bits_per_byte(items))
    with np.errstate(over="ignore"):
        value = WORD_PERPLEXITY.value(sums)
    try:
        assert value == pytest.approx(harness.weighted_perplexity(items))
    except OverflowError:
        assert value == math.inf


followed = st.lists(st.booleans(), min_size=1, max_size=4)


@given(st.lists(st.tuples(followed, followed), min_size=1, max_size=10))
def test_the_aggregate_is_the_mean_of_ifevals_four(answers: list[tuple[list[bool], list[bool]]]) -> None:
    items = [
        dict(zip((*PROMPT_LEVEL, *INST_LEVEL), (all(strict), all(loose), strict, loose), strict=True))
        for strict, loose in answers
    ]
    sums = parts_of(IFEVAL, items).sum(axis=0)
    assert IFEVAL.value(sums) == pytest.approx(harness_value(IFEVAL, items))


IFEVAL_AGGREGATION = dict.fromkeys(PROMPT_LEVEL, harness.mean) | dict.fromkeys(INST_LEVEL, harness.mean)


@pytest.mark.parametrize(
    ("name", "aggregation", "expected"),
    [
        ("acc", {"acc": harness.mean}, Metric("acc", "mean")),
        ("perplexity", {"perplexity": harness.perplexity}, Metric("perplexity", "perplexity", False)),
        ("word_perplexity", {"word_perplexity": harness.weighted_perplexity}, WORD_PERPLEXITY),
        ("bits_per_byte", {"bits_per_byte": harness.bits_per_byte}, BITS),
        (LOSS, {"word_perplexity": harness.weighted_perplexity}, Metric(LOSS, "nats", False)),
        ("pass@1", {"pass_at_k": harness.mean}, Metric("pass@1", "mean")),
        ("pass_at_k", {"pass_at_k": harness.mean}, Metric("pass@1", "mean")),
        (AGGREGATE, IFEVAL_AGGREGATION, IFEVAL),
    ],
)
def test_a_tasks_metric_is_found_by_its_name(name: str, aggregation: dict[str, Any], expected: Metric) -> None:
    directions = {name: expected.higher_is_better}
    assert metric_of(name, aggregation, directions) == expected
    assert expected.is_share == (name in ("acc", "pass@1", "pass_at_k", AGGREGATE))


def test_ifevals_own_aggregation_is_known() -> None:
    name = "inst_level_strict_acc"
    assert metric_of(name, {name: ifeval_utils().agg_inst_level_acc}, {name: True}) == Metric(name, "mean")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (LOSS, "it has no metric 'loss' but acc, f1"),
        ("accuracy", "it has no metric 'accuracy' but acc, f1"),
        ("pass@1", "it has no metric 'pass@1' but acc, f1"),
        (AGGREGATE, "the metric 'aggregate' is IFEval's; this task has acc, f1"),
        ("f1", "its metric 'f1' is not a mean over items, so two models cannot be paired on it"),
    ],
)
def test_a_metric_that_cannot_be_compared_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        metric_of(name, {"acc": harness.mean, "f1": harness.f1_score}, {})
    assert str(refused.value) == sentence
