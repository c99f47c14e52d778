"""Metrics as sums over items, so that two models can be compared item by item."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

AGGREGATE = "aggregate"  # IFEval's four accuracies, averaged
LOSS = "loss"  # nats a token, which the harness does not have: it counts words and bytes
OF_WORDS = "word_perplexity"  # the harness's of whole documents
_IFEVAL = ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")


@dataclass(frozen=True)
class Metric:
    """A metric as quotients of sums over items: an item's parts are pairs of a numerator and a denominator."""

    name: str  # the harness's, AGGREGATE or LOSS
    kind: str  # mean, perplexity, bits or nats
    higher_is_better: bool = True

    @property
    def is_share(self) -> bool:
        """Whether its values may be shares, which lie between 0 and 1 and are printed in per cent."""
        return self.kind == "mean"

    def parts(self, pairs: dict[str, list[float]]) -> list[float]:
        """An item's parts from the pairs of all its metrics."""
        return [number for name in (_IFEVAL if self.name == AGGREGATE else (self.name,)) for number in pairs[name]]

    def value(self, sums: np.ndarray) -> float:
        """The metric where the parts add up to `sums`, [parts]."""
        quotient = float((sums[0::2] / sums[1::2]).mean())
        return float(np.exp(-quotient)) if self.kind == "perplexity" else _FACTORS[self.kind] * quotient

    def slope(self, value: float) -> float:
        """How the metric changes with the mean quotient, where it has this value."""
        return -value if self.kind == "perplexity" else _FACTORS[self.kind]


def metric_of(name: str, aggregation: dict[str, Callable[..., Any]], higher_is_better: dict[str, bool]) -> Metric:
    """The task's metric `name`. Raises ValueError if the task has none of this name, or it is no quotient of sums."""
    if name == AGGREGATE:
        if not set(_IFEVAL) <= aggregation.keys():
            raise ValueError(f"the metric '{AGGREGATE}' is IFEval's; this task has {', '.join(aggregation)}")
        return Metric(name, "mean")
    if name == LOSS and OF_WORDS in aggregation:
        return Metric(name, "nats", higher_is_better=False)
    if name in ("pass@1", "pass_at_k") and "pass_at_k" in aggregation:
        return Metric("pass@1", "mean")  # as items' logs call it
    if name not in aggregation:
        raise ValueError(f"it has no metric '{name}' but {', '.join(aggregation)}")
    kind = _KINDS.get(aggregation[name].__name__)
    if kind is None:
        raise ValueError(f"its metric '{name}' is not a mean over items, so two models cannot be paired on it")
    return Metric(name, kind, higher_is_better.get(name, True))


def pair(value: Any) -> list[float] | None:
    """The numerator and denominator of the value that the harness logs for an item; None if it is of another kind.

    The harness logs a number, a list of them (an item with several answers), or a tuple of log-likelihood and length.
    """
    if _is_number(value):
        return [float(value), 1.0]
    if not isinstance(value, (list, tuple)) or not all(map(_is_number, value)):
        return None
    if isinstance(value, list):
        return [float(sum(value)), float(len(value))]
    return [float(value[0]), float(value[1])] if len(value) == 2 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.bool_, np.number))


# the harness's aggregations by the names of their functions
_KINDS = {
    "mean": "mean",
    "agg_inst_level_acc": "mean",
    "perplexity": "perplexity",
    "weighted_perplexity": "perplexity",
    "bits_per_byte": "bits",
}
_FACTORS = {"mean": 1.0, "nats": -1.0, "bits": -1 / math.log(2)}
