"""Standard errors and significance against resampling, enumeration and definitions."""

from __future__ import annotations

import math
import random
import statistics as plain
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rewired.evaluate.metrics import AGGREGATE, Metric
from rewired.evaluate.statistics import LEVEL, Delta, delta, score, significant

from .harness_metrics import (
    ACC,
    BITS,
    IFEVAL,
    INST_LEVEL,
    PROMPT_LEVEL,
    WORD_PERPLEXITY,
    Item,
    harness_value,
    parts_of,
)

# what models answer: a rewired model fails where its original fails, and on some more items


def right_or_wrong(n: int, generator: random.Random) -> tuple[list[Item], list[Item]]:
    original = [float(generator.random() < 0.6) for _ in range(n)]
    other = [right if generator.random() < 0.85 else 1.0 - right for right in original]
    return [{"acc": right} for right in original], [{"acc": right} for right in other]


def shares(n: int, generator: random.Random) -> tuple[list[Item], list[Item]]:
    original = [generator.random() for _ in range(n)]
    return [{"acc": x} for x in original], [{"acc": 0.9 * x + 0.1 * generator.random()} for x in original]


def documents(name: str) -> Callable[[int, random.Random], tuple[list[Item], list[Item]]]:
    def answer(n: int, generator: random.Random) -> tuple[list[Item], list[Item]]:
        words = [generator.randint(5, 400) for _ in range(n)]
        original = [-count * generator.uniform(1.0, 3.0) for count in words]
        other = [value * generator.uniform(1.0, 1.2) for value in original]
        before, after = ([{name: logged} for logged in zip(values, words, strict=True)] for values in (original, other))
        return before, after

    return answer


def instructions(n: int, generator: random.Random) -> tuple[list[Item], list[Item]]:
    """IFEval's: a prompt has one to three instructions, and is followed if all are; leniently, more are."""

    def item(strict: list[bool]) -> Item:
        loose = [followed or generator.random() < 0.1 for followed in strict]
        return dict(zip((*PROMPT_LEVEL, *INST_LEVEL), (all(strict), all(loose), strict, loose), strict=True))

    original = [[generator.random() < 0.6 for _ in range(generator.randint(1, 3))] for _ in range(n)]
    other = [[followed and generator.random() < 0.9 for followed in strict] for strict in original]
    return [item(strict) for strict in original], [item(strict) for strict in other]


KINDS = {
    "right or wrong": (ACC, right_or_wrong),
    "shares": (ACC, shares),
    "perplexity per word": (WORD_PERPLEXITY, documents("word_perplexity")),
    "bits per byte": (BITS, documents("bits_per_byte")),
    "IFEval's aggregate": (IFEVAL, instructions),
}
each_kind = pytest.mark.parametrize(("metric", "answer"), KINDS.values(), ids=KINDS)


def bootstrap(value: Callable[[list[int]], float], n: int, resamples: int = 1000) -> float:
    """The standard deviation of `value` over resamples of the items, one by one."""
    generator = random.Random(7)
    return plain.stdev(value(generator.choices(range(n), k=n)) for _ in range(resamples))


# standard errors


@each_kind
def test_the_paired_standard_error_is_that_of_resampled_items(metric: Metric, answer: Callable[..., Any]) -> None:
    original, other = answer(120, random.Random(1))

    def difference(drawn: list[int]) -> float:
        before, after = [original[item] for item in drawn], [other[item] for item in drawn]
        return harness_value(metric, after) - harness_value(metric, before)

    ours = delta(metric, parts_of(metric, original), parts_of(metric, other))
    monte_carlo = 1 / math.sqrt(2 * 1000)  # the relative error of a standard deviation of 1000 draws
    assert ours.standard_error == pytest.approx(bootstrap(difference, 120), rel=4 * monte_carlo)
    assert ours.value == pytest.approx(harness_value(metric, other) - harness_value(metric, original))


@each_kind
def test_a_models_own_standard_error_is_that_of_resampled_items(metric: Metric, answer: Callable[..., Any]) -> None:
    items, _ = answer(120, random.Random(2))
    scored = score(metric, parts_of(metric, items))
    expected = bootstrap(lambda drawn: harness_value(metric, [items[item] for item in drawn]), 120)
    assert scored.standard_error == pytest.approx(expected, rel=4 / math.sqrt(2 * 1000))
    assert (scored.value, scored.n) == (pytest.approx(harness_value(metric, items)), 120)


@each_kind
def test_pairing_helps_where_models_share_failures(metric: Metric, answer: Callable[..., Any]) -> None:
    before, after = (parts_of(metric, items) for items in answer(120, random.Random(3)))
    errors = [score(metric, parts).standard_error or 0.0 for parts in (before, after)]
    paired = delta(metric, before, after).standard_error
    assert paired is not None and 0 < paired < 0.7 * math.hypot(*errors)


def test_pairing_does_not_help_where_failures_are_independent() -> None:
    generator = random.Random(4)
    before, after = (parts_of(ACC, right_or_wrong(2000, generator)[0]) for _ in range(2))
    errors = [score(ACC, parts).standard_error or 0.0 for parts in (before, after)]
    assert delta(ACC, before, after).standard_error == pytest.approx(math.hypot(*errors), rel=0.05)


def test_a_perplexitys_standard_error_agrees_with_the_delta_method() -> None:
    """d exp(-A/B) = -exp(-A/B) d(A/B), and the variance of A/B is that of the residuals a - (A/B) b, over B^2."""
    n = 500
    parts = parts_of(WORD_PERPLEXITY, documents("word_perplexity")(n, random.Random(5))[0])
    a, b = parts.T
    ratio = a.sum() / b.sum()
    expected = np.exp(-ratio) * np.sqrt(((a - ratio * b) ** 2).sum()) / b.sum()
    assert score(WORD_PERPLEXITY, parts).standard_error == pytest.approx(expected, rel=0.04)


def test_a_shares_standard_error_is_the_textbooks() -> None:
    scored = score(ACC, parts_of(ACC, [{"acc": 1.0}] * 30 + [{"acc": 0.0}] * 20))
    assert scored.value == 0.6
    assert scored.standard_error == pytest.approx(math.sqrt(0.6 * 0.4 / 49))


@each_kind
def test_one_item_gives_no_standard_error_and_no_verdict(metric: Metric, answer: Callable[..., Any]) -> None:
    before, after = (parts_of(metric, items) for items in answer(1, random.Random(6)))
    assert score(metric, before).standard_error is None
    difference = delta(metric, before, after)
    assert difference.standard_error is None
    assert difference.p in (None, 1.0), "McNemar's test has a p here, which says nothing"
    assert significant([difference]) == [False]


@each_kind
def test_identical_answers_are_no_difference(metric: Metric, answer: Callable[..., Any]) -> None:
    parts = parts_of(metric, answer(25, random.Random(8))[0])
    difference = delta(metric, parts, parts)
    assert (difference.value, difference.standard_error, difference.p) == (0, 0, 1)
    assert significant([difference]) == [False]


def test_items_that_are_neither_right_nor_wrong_change_where_any_part_does() -> None:
    original, other = np.array([[0.5, 1, 1, 1]] * 3), np.array([[0.5, 1, 1, 1], [0.5, 1, 0, 1], [0, 1, 1, 1]])
    found = delta(Metric(AGGREGATE, "mean"), original, other)
    assert (found.changed, found.flips) == (pytest.approx(2 / 3), None)


# p values


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 5), st.integers(0, 5))
def test_mcnemars_p_is_the_share_of_sign_patterns_at_least_as_extreme(
    gained: int, lost: int, both: int, neither: int
) -> None:
    """Under the null each discordant item is either model's: 2^n patterns, all alike."""
    patterns = list(product((1, -1), repeat=gained + lost))
    expected = sum(abs(sum(pattern)) >= abs(gained - lost) for pattern in patterns) / len(patterns)
    rows = [(0, 1)] * gained + [(1, 0)] * lost + [(1, 1)] * both + [(0, 0)] * neither or [(1, 1)]
    before, after = (np.array([[float(row[model]), 1.0] for row in rows]) for model in (0, 1))
    assert delta(ACC, before, after).p == pytest.approx(expected)
    assert delta(ACC, after, before).p == pytest.approx(expected), "two-sided"


@pytest.mark.parametrize(("gained", "lost"), [(3, 20), (40, 60), (0, 30), (51, 50), (500, 600)])
def test_mcnemars_p_is_scipys_exact_binomial_of_the_discordant_items(gained: int, lost: int) -> None:
    before = np.array([[0.0, 1.0]] * gained + [[1.0, 1.0]] * lost + [[1.0, 1.0]] * 1000)
    after = np.array([[1.0, 1.0]] * gained + [[0.0, 1.0]] * lost + [[1.0, 1.0]] * 1000)
    assert delta(ACC, before, after).p == pytest.approx(stats.binomtest(gained, gained + lost).pvalue)


def test_what_is_not_right_or_wrong_gets_a_test_of_its_paired_differences() -> None:
    """On many items, z and the paired t test agree."""
    before, after = (parts_of(ACC, items) for items in shares(3000, random.Random(9)))
    after[:, 0] += 0.0015 - (after - before)[:, 0].mean()
    expected = stats.ttest_rel(after[:, 0], before[:, 0]).pvalue
    assert 0.01 < expected < 0.2, "a case that tells something"
    assert delta(ACC, before, after).p == pytest.approx(expected, rel=0.02)


def rejections(draw: Callable[[np.random.Generator], Iterable[Delta]], simulations: int) -> float:
    """In which share of simulations anything is found significant."""
    generator = np.random.default_rng(11)
    return sum(any(significant(list(draw(generator)))) for _ in range(simulations)) / simulations


def at_most_the_level(rate: float, simulations: int) -> bool:
    return rate <= LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / simulations)


@pytest.mark.parametrize("n", [10, 50])
def test_equally_good_models_are_told_apart_at_most_at_the_level(n: int) -> None:
    """Items differ in difficulty, so that both models fail on the same; three tasks are judged together."""

    def draw(generator: np.random.Generator) -> Iterable[Delta]:
        for _ in range(3):
            difficulty = generator.random(n)
            before, after = ((generator.random(n) < difficulty).astype(float) for _ in range(2))
            yield delta(ACC, np.stack([before, np.ones(n)], 1), np.stack([after, np.ones(n)], 1))

    assert at_most_the_level(rejections(draw, 300), 300)


@pytest.mark.parametrize("n", [5, 10, 100])
def test_equally_good_shares_are_told_apart_at_most_at_the_level(n: int) -> None:
    """Also where a --limit leaves few items."""

    def draw(generator: np.random.Generator) -> Iterable[Delta]:
        common = generator.normal(size=n)
        before, after = (common + 0.5 * generator.normal(size=n) for _ in range(2))
        yield delta(ACC, np.stack([before, np.ones(n)], 1), np.stack([after, np.ones(n)], 1))

    assert at_most_the_level(rejections(draw, 600), 600)


def test_a_real_difference_is_found() -> None:
    before, after = (parts_of(WORD_PERPLEXITY, items) for items in documents("word_perplexity")(60, random.Random(12)))
    assert significant([delta(WORD_PERPLEXITY, before, after)]) == [True]


# many comparisons


def step_down(p_values: Sequence[float]) -> list[bool]:
    """Holm's procedure, step by step: reject the smallest at LEVEL over how many are left, until one stays."""
    left = list(range(len(p_values)))
    rejected: set[int] = set()
    while left:
        smallest = min(left, key=lambda index: p_values[index])
        if p_values[smallest] > LEVEL / len(left):
            break
        rejected.add(smallest)
        left.remove(smallest)
    return [index in rejected for index in range(len(p_values))]


def closed_test(p_values: Sequence[float]) -> list[bool]:
    """A hypothesis is rejected if Bonferroni rejects every set of hypotheses that it is in: what Holm is short for."""
    everything = range(len(p_values))
    sets = [chosen for size in range(1, len(p_values) + 1) for chosen in combinations(everything, size)]
    not_rejected = [chosen for chosen in sets if min(p_values[index] for index in chosen) > LEVEL / len(chosen)]
    return [not any(index in chosen for chosen in not_rejected) for index in everything]


def verdicts(p_values: Iterable[float | None]) -> list[bool]:
    return significant([Delta(0.1, 0.1, p) for p in p_values])


@pytest.mark.parametrize(
    "p_values",
    [
        (0.001, 0.012, 0.02, 0.04, 0.9),
        (0.001, 0.02, 0.02, 0.02, 0.02),
        (0.04, 0.04, 0.04),
        (0.05,),
        (LEVEL / 4, LEVEL / 3, LEVEL / 2, LEVEL),
        (1.0, 1.0),
    ],
)
def test_verdicts_are_holms_in_every_order(p_values: tuple[float, ...]) -> None:
    for order in permutations(p_values):
        assert verdicts(order) == step_down(order) == closed_test(order)


@given(st.lists(st.one_of(st.floats(0, 0.06), st.floats(0, 1)), max_size=6))
def test_verdicts_are_those_of_the_closed_test(p_values: list[float]) -> None:
    assert verdicts(p_values) == closed_test(p_values) == step_down(p_values)


def test_a_task_without_a_p_is_not_judged_and_costs_the_others_nothing() -> None:
    assert verdicts([None, 0.04, None]) == [False, True, False]


def test_a_broken_models_perplexity_is_not_significantly_other() -> None:
    parts = parts_of(WORD_PERPLEXITY, documents("word_perplexity")(20, random.Random(13))[0])
    broken = parts * [math.nan, 1]
    assert significant([delta(WORD_PERPLEXITY, parts, broken)]) == [False]
