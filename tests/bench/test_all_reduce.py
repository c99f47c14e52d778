"""Measured all-reduces: rows for every size and group, on which all ranks agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from rewired.bench.communication import measure_all_reduces
from rewired.ranks import run_on_ranks


def test_every_rank_has_rank_0s_times_of_each_group_and_size() -> None:
    first, second = run_on_ranks(measure, 2)
    assert first == second
    assert [(row["gpus"], row["link"], row["bytes"]) for row in first] == [
        (2, "one", 64), (2, "other", 64), (2, "one", 4096), (2, "other", 4096),
    ]  # fmt: skip
    for row in first:
        assert 0 < row["quartiles"][0] <= row["seconds"] <= row["quartiles"][1]


def measure() -> list[dict[str, Any]]:
    groups = {"one": distributed.group.WORLD, "other": distributed.new_group()}
    return measure_all_reduces(groups, torch.bfloat16, sizes=[64, 4096], rounds=3)
