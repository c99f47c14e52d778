"""Paired statistics of the difference between two models that answered the same items.

The paired standard error is that of the per-item differences. It is often far below the one for independent samples,
because models that share weights fail on the same items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .metrics import Metric

LEVEL = 0.05  # of significance, over all tasks of a model together
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Score:
    value: float
    standard_error: float | None  # None for a single item
    n: int


@dataclass(frozen=True)
class Delta:
    value: float  # other minus original
    standard_error: float | None  # paired
    p: float | None  # two-sided: McNemar's exact test for right or wrong, else a paired t test, of a perplexity's log
    flips: float | None = None  # the share of items, right or wrong, that one of the two alone gets right


def score(metric: Metric, parts: np.ndarray) -> Score:
    """A model's value on its items' parts, [n, parts]."""
    value = float(metric.value(parts.sum(axis=0)))
    return Score(value, _standard_error(metric, parts[None]), len(parts))


def delta(metric: Metric, original: np.ndarray, other: np.ndarray) -> Delta:
    """Of two models on the same items, [n, parts] each, in the same order."""
    value = float(metric.value(other.sum(axis=0)) - metric.value(original.sum(axis=0)))
    error = _standard_error(metric, np.stack([other, original]))
    if metric.kind == "mean" and original.shape[1] == 2 and _is_right_or_wrong(original) and _is_right_or_wrong(other):
        flips = float((original[:, 0] != other[:, 0]).mean())
        return Delta(value, error, _mcnemar(original[:, 0], other[:, 0]), flips)
    return Delta(value, error, _t_test(original, other) if error is not None else None)


def flips_error(flips: float, difference: float, n: int) -> float:
    """The paired standard error where a share `flips` of n items, right or wrong, changes, by `difference` in sum.

    Each of the four outcomes of an item counts half an item more (Agresti and Min, 2005): a few items without a flip do
    not show that there are none.
    """
    variance = (n * flips + 1) / (n + 2) - (n * difference / (n + 2)) ** 2
    return math.sqrt(variance / (n + 2))


def significant(deltas: Sequence[Delta]) -> list[bool]:
    """Whether each of one model's differences is significant, at LEVEL over all of them together (Holm, 1979)."""
    order = sorted((given.p, index) for index, given in enumerate(deltas) if given.p is not None)
    verdicts = [False] * len(deltas)
    for rank, (p, index) in enumerate(order):
        if p > LEVEL / (len(order) - rank):
            break
        verdicts[index] = True
    return verdicts


def _t_test(original: np.ndarray, other: np.ndarray) -> float | None:
    """Paired, of the difference between mean quotients, each item's part in it to first order (the delta method).

    A perplexity is tested as the log that it is the exponential of: the exponential has too heavy a tail.
    """
    n = len(original)
    influences = [_influence(parts) for parts in (other, original)]
    difference = influences[0].mean() - influences[1].mean()
    error = float((influences[0] - influences[1]).std(ddof=1) / np.sqrt(n))
    if not error:
        return float(difference == 0)
    p = float(2 * stats.t.sf(abs(difference) / error, n - 1))
    return None if np.isnan(p) else p


def _influence(parts: np.ndarray) -> np.ndarray:
    """Numbers, [n], whose mean is the mean quotient and whose spread is its sampling error's."""
    numerators, denominators = parts[:, 0::2], parts[:, 1::2]
    quotients = numerators.sum(axis=0) / denominators.sum(axis=0)
    deviations = (numerators - quotients * denominators) / denominators.mean(axis=0)
    influences: np.ndarray = (quotients + deviations).mean(axis=1)
    return influences


def _standard_error(metric: Metric, parts: np.ndarray) -> float | None:
    """Of the first model's value, or of the first's minus the second's: [1 or 2, n, parts]."""
    n = parts.shape[1]
    if n < 2:
        return None
    if metric.kind == "mean" and parts.shape[2] == 2 and (parts[..., 1] == 1).all():
        values = parts[0, :, 0] - (parts[1, :, 0] if len(parts) == 2 else 0)
        return float(values.std(ddof=1) / np.sqrt(n))
    generator = np.random.default_rng(0)
    draws = []
    for _ in range(0, _RESAMPLES, 500):  # paired: a resample draws items, and both models' answers to them
        counts = generator.multinomial(n, np.full(n, 1 / n), size=500)  # [500, n]
        values = metric.value(np.einsum("bn,mnp->mbp", counts, parts))  # [models, 500]
        draws.append(values[0] - (values[1] if len(values) == 2 else 0))
    return float(np.concatenate(draws).std(ddof=1))


def _is_right_or_wrong(parts: np.ndarray) -> bool:
    return bool(np.isin(parts[:, 0], (0, 1)).all() and (parts[:, 1] == 1).all())


def _mcnemar(original: np.ndarray, other: np.ndarray) -> float:
    """Exact: under the null, an item that only one of the two gets right is either's with probability 1/2."""
    gained, lost = int(((original == 0) & (other == 1)).sum()), int(((original == 1) & (other == 0)).sum())
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0
