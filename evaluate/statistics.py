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
    changed: float | None = None  # the share of items, of another mean, that the two do not answer alike


def score(metric: Metric, parts: np.ndarray) -> Score:
    """A model's value on its items' parts, [n, parts]."""
    value = metric.value(parts.sum(axis=0))
    return Score(value, _standard_error(metric.slope(value) * _influence(parts)), len(parts))


def delta(metric: Metric, original: np.ndarray, other: np.ndarray) -> Delta:
    """Of two models on the same items, [n, parts] each, in the same order."""
    before, after = metric.value(original.sum(axis=0)), metric.value(other.sum(axis=0))
    influences = _influence(original), _influence(other)
    error = _standard_error(metric.slope(after) * influences[1] - metric.slope(before) * influences[0])
    if metric.kind == "mean" and original.shape[1] == 2 and _is_right_or_wrong(original) and _is_right_or_wrong(other):
        flips = float((original[:, 0] != other[:, 0]).mean())
        return Delta(after - before, error, _mcnemar(original[:, 0], other[:, 0]), flips)
    changed = float((original != other).any(axis=1).mean()) if metric.kind == "mean" else None
    return Delta(after - before, error, _t_test(*influences) if error is not None else None, changed=changed)


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


def _influence(parts: np.ndarray) -> np.ndarray:
    """Each item's part in the mean quotient to first order (the delta method): [n], whose mean it is.

    A standard error is that of the influences' mean.
    """
    numerators, denominators = parts[:, 0::2], parts[:, 1::2]
    quotients = numerators.sum(axis=0) / denominators.sum(axis=0)
    deviations = (numerators - quotients * denominators) / denominators.mean(axis=0)
    influences: np.ndarray = (quotients + deviations).mean(axis=1)
    return influences


def _standard_error(influences: np.ndarray) -> float | None:
    n = len(influences)
    return float(influences.std(ddof=1) / np.sqrt(n)) if n > 1 else None


def _t_test(original: np.ndarray, other: np.ndarray) -> float | None:
    """Paired, of influences on the mean quotient: a perplexity's own, its exponential, has too heavy a tail."""
    p = 1.0 if (original == other).all() else float(stats.ttest_rel(other, original).pvalue)
    return None if np.isnan(p) else p


def _is_right_or_wrong(parts: np.ndarray) -> bool:
    return bool(np.isin(parts[:, 0], (0, 1)).all() and (parts[:, 1] == 1).all())


def _mcnemar(original: np.ndarray, other: np.ndarray) -> float:
    """Exact: under the null, an item that only one of the two gets right is either's with probability 1/2."""
    gained, lost = int(((original == 0) & (other == 1)).sum()), int(((original == 1) & (other == 0)).sum())
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0
