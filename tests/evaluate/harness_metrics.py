"""Metrics of ours, and the harness's own aggregation of the same items."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
from lm_eval.api import metrics as harness

from rewired.evaluate.metrics import AGGREGATE, Metric, pair

ACC = Metric("acc", "mean")
WORD_PERPLEXITY = Metric("word_perplexity", "perplexity", higher_is_better=False)
BITS = Metric("bits_per_byte", "bits", higher_is_better=False)
IFEVAL = Metric(AGGREGATE, "mean")
PROMPT_LEVEL = ("prompt_level_strict_acc", "prompt_level_loose_acc")
INST_LEVEL = ("inst_level_strict_acc", "inst_level_loose_acc")

Item = dict[str, Any]  # what the harness logs for one item, metric -> value


@cache
def ifeval_utils() -> Any:
    """The harness's own, which looks for a download as it is imported."""
    with patch("nltk.download", return_value=True):
        from lm_eval.tasks.ifeval import utils
    return utils


def harness_value(metric: Metric, items: Sequence[Item]) -> float:
    """The metric as the harness aggregates it over the items."""
    if metric == IFEVAL:
        prompts = [harness.mean([item[name] for item in items]) for name in PROMPT_LEVEL]
        instructions = [ifeval_utils().agg_inst_level_acc([item[name] for item in items]) for name in INST_LEVEL]
        return sum(prompts + instructions) / 4
    aggregate = {ACC: harness.mean, WORD_PERPLEXITY: harness.weighted_perplexity, BITS: harness.bits_per_byte}[metric]
    return aggregate([item[metric.name] for item in items])


def parts_of(metric: Metric, items: Sequence[Item]) -> np.ndarray:
    pairs = [{name: pair(value) for name, value in item.items()} for item in items]
    return np.array([metric.parts(item) for item in pairs])
