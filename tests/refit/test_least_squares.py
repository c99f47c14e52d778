"""Ridge regression over streamed tokens, against numpy on the whole data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewired.refit.least_squares import RidgeRegression

CPU = torch.device("cpu")


def naive(inputs: np.ndarray, targets: np.ndarray, ridge: float) -> np.ndarray:
    """Least squares with a row of sqrt(penalty) for each coefficient, by numpy's own solver (an SVD)."""
    penalty = ridge * (inputs**2).sum(0).mean()
    rows = np.vstack([inputs, np.sqrt(penalty) * np.eye(inputs.shape[1])])
    return np.linalg.lstsq(rows, np.vstack([targets, np.zeros((inputs.shape[1], targets.shape[1]))]), rcond=None)[0]


@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(5, 40),
    st.sampled_from([1e-3, 1e-1, 1.0]),
    st.data(),
)
def test_the_solution_is_that_of_numpy_whatever_the_batches(
    problems: int, inputs: int, outputs: int, tokens: int, ridge: float, data: st.DataObject
) -> None:
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(problems, tokens, inputs)).astype(np.float32)
    y = (x @ rng.normal(size=(problems, inputs, outputs)) + 0.1 * rng.normal(size=(problems, tokens, outputs))).astype(
        np.float32
    )
    regression = RidgeRegression(problems, inputs, outputs, CPU)
    start = 0
    while start < tokens:
        stop = start + data.draw(st.integers(1, tokens))
        regression.add(torch.tensor(x[:, start:stop]), torch.tensor(y[:, start:stop]), held_out=False)
        start = stop
    regression.add(torch.tensor(x), torch.tensor(y), held_out=True)  # so that the fit is an improvement
    delta, errors = regression.solve([ridge])
    for problem in range(problems):
        if errors.ridges[problem] is not None:
            expected = naive(x[problem], y[problem], ridge)
            np.testing.assert_allclose(delta[problem].numpy(), expected, rtol=1e-4, atol=1e-5)
    assert any(ridge is not None for ridge in errors.ridges)


def fitted(x: torch.Tensor, y: torch.Tensor, held_out_x: torch.Tensor, held_out_y: torch.Tensor, ridges: list[float]):
    regression = RidgeRegression(len(x), x.shape[-1], y.shape[-1], CPU)
    regression.add(x, y, held_out=False)
    for half in (slice(0, 7), slice(7, None)):  # held-out tokens come in batches too, not all of one size
        regression.add(held_out_x[:, half], held_out_y[:, half], held_out=True)
    return regression.solve(ridges)


def test_errors_are_mean_squares_on_the_held_out_tokens() -> None:
    x, judge = torch.randn(2, 50, 4), torch.randn(2, 20, 4)
    true = torch.randn(2, 4, 3)
    delta, errors = fitted(x, x @ true, judge, judge @ true, [0.01])
    assert errors.before == pytest.approx((judge @ true).square().mean().item(), rel=1e-5)
    left = judge @ delta - judge @ true
    assert errors.after == pytest.approx(left.square().mean().item(), rel=1e-4)


def test_what_does_not_help_on_held_out_tokens_is_zero() -> None:
    """Noise fits the tokens that it was fitted on, and no others."""
    x, y = torch.randn(1, 30, 20), torch.randn(1, 30, 5)
    held_out_x, held_out_y = torch.randn(1, 200, 20), torch.randn(1, 200, 5)
    delta, errors = fitted(x, y, held_out_x, held_out_y, [1e-6])
    assert not errors.has_fit
    assert errors.ridges == (None,)
    assert delta.abs().max() == 0
    assert errors.after == errors.before


def test_each_problem_is_judged_for_itself() -> None:
    x, judge = torch.randn(2, 40, 6), torch.randn(2, 40, 6)
    true = torch.randn(6, 2)
    y = torch.stack([x[0] @ true, torch.randn(40, 2)])
    held_out_y = torch.stack([judge[0] @ true, torch.randn(40, 2)])
    delta, errors = fitted(x, y, judge, held_out_y, [1e-6])
    assert errors.ridges == (1e-6, None)
    torch.testing.assert_close(delta[0], true, rtol=1e-3, atol=1e-3)
    assert delta[1].abs().max() == 0


@pytest.mark.parametrize("x", [torch.zeros(1, 20, 4), torch.ones(1, 20, 4)], ids=["zero", "dependent"])
def test_inputs_without_a_solution_change_nothing_or_give_a_finite_one(x: torch.Tensor) -> None:
    delta, _ = fitted(x, torch.randn(1, 20, 3), x, torch.randn(1, 20, 3), [1e-30])
    assert delta.isfinite().all()
