"""pass@k of a model's programs, which run in the sandbox."""

from __future__ import annotations

from itertools import combinations

import pytest

from rewired.evaluate.code_execution import CodeEval, pass_at_k

from .test_sandbox import needs_sandbox

ADD = "def add(a, b):\n    return a + b\n"
SUBTRACT = "def add(a, b):\n    return a - b\n"
TEST_ADD = "assert add(2, 3) == 5"


@pytest.mark.parametrize("passing", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_draws_with_a_passing_candidate(passing: int, k: int) -> None:
    draws = list(combinations([True] * passing + [False] * (5 - passing), k))
    assert pass_at_k(5, passing, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@needs_sandbox
def test_pass_at_k_is_averaged_over_problems() -> None:
    scores, outcomes = CodeEval().compute(
        references=[TEST_ADD, "assert add(0, 0) == 1"], predictions=[[ADD, SUBTRACT], [ADD, SUBTRACT]], k=[1, 2]
    )
    assert scores == {"pass@1": 0.25, "pass@2": 0.5}
    assert {problem: [outcome.passed for outcome in row] for problem, row in outcomes.items()} == {
        0: [True, False],
        1: [False, False],
    }


@needs_sandbox
def test_a_k_above_the_fewest_candidates_is_left_out() -> None:
    scores, _ = CodeEval().compute(references=[TEST_ADD, TEST_ADD], predictions=[[ADD, ADD], [ADD]], k=[1, 2, 100])
    assert scores == {"pass@1": 1.0}
