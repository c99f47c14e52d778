"""Layers that stay gathered from forward to backward, as AxoNN's cached gathers: fewer gathers, the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from rewired.adapt.model.student import load_student
from rewired.adapt.recipe.keys import Recipe
from rewired.ranks import run_on_ranks
from tests.adapt.world import LADDER, make_rewired


def steps(folder: Path) -> dict[int, tuple[int, list[Any]]]:
    return {cached: step(folder, cached) for cached in (0, 1, 99)}


def step(folder: Path, cached: int) -> tuple[int, list[Any]]:
    """How often a step gathers, with activations computed twice, and its gradients."""
    recipe = Recipe(model=str(folder), datasets=["unused"], fsdp_size=2, cache_gathers=cached)  # type: ignore[list-item]
    model: Any = load_student(recipe, folder)
    model.gradient_checkpointing_enable()
    ids = torch.arange(3, 35).reshape(2, 16)
    gather = mock.Mock(side_effect=_fsdp_param_group.foreach_all_gather)
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", gather):
        model.train()(input_ids=ids, labels=ids).loss.backward()
    return gather.call_count, [parameter.grad.full_tensor().numpy() for parameter in model.parameters()]


def test_cached_layers_are_gathered_once_and_gradients_are_the_same(dense: Path, tmp_path: Path) -> None:
    folder = make_rewired(dense, tmp_path / "ladder", LADDER)
    for found in run_on_ranks(steps, 2, folder):
        (plain, expected), *others = found.values()
        assert [plain - gathers for gathers, _ in others] == [1, 4], "of one layer, and of all four"
        for _, gradients in others:
            assert all(map(numpy.array_equal, gradients, expected))
