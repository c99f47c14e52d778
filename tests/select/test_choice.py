"""The choice within a budget, against all choices."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from rewired.select.choice import STANDARD, Price, choose

NAMES = ("a", "b")
prices = st.floats(0, 10).map(lambda value: round(value, 3))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Price, list[dict[str, int]]]:
    layers = draw(st.integers(1, 6))
    single = [{name: draw(prices) for name in NAMES} for _ in range(layers)]
    excess = [
        {pair: draw(prices) - 5 for pair in product(NAMES, NAMES)} for _ in range(layers)
    ]  # two layers can also cost less than each alone
    units = [{STANDARD: 0} | {name: draw(st.integers(-2, 2)) for name in NAMES} for _ in range(layers)]
    return Price(single, lambda layer, one, other: excess[layer][one, other]), units


@settings(max_examples=200)
@given(problems(), st.sets(st.integers(-6, 6)))
def test_none_is_better(problem: tuple[Price, list[dict[str, int]]], budgets: set[int]) -> None:
    price, units = problem
    within = [
        choice
        for choice in product((STANDARD, *NAMES), repeat=len(units))
        if sum(units[layer][name] for layer, name in enumerate(choice)) in budgets
    ]
    found = choose(price, units, budgets)
    if not within:
        assert found is None
    else:
        assert found in within
        assert abs(price.of(found) - min(map(price.of, within))) < 1e-9


def test_a_price_counts_neighbours_that_are_both_rewired() -> None:
    price = Price([{"a": 1.0}] * 4, lambda layer, one, other: 10.0**layer)
    assert price.of(("a", "a", STANDARD, "a")) == 3 + 1
    assert price.of((STANDARD, "a", "a", "a")) == 3 + 10 + 100
