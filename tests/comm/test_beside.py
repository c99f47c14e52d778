"""`comm` beside replicas of a model and beside ranks that share its layers: they learn what they do without."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributed

from rewired.adapt.model.student import load_student
from rewired.adapt.recipe.keys import Recipe
from rewired.comm.communication import _layers
from rewired.comm.companion import CommKeys
from rewired.comm.options import PRESETS, Comm
from rewired.ranks import run_on_ranks
from tests.rewired.sharded import gradients, saved, whole
from tests.rewired.tiny import tokens

from .slices import BF16

WIRING = [{"layers": "1-2", "preset": "ladder", "peek": True}]
SIZES = {"tp_shards": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}  # which 8 ranks can share
WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 512, "attention_bias": False, "mlp_bias": False}  # matrices
STEPS = 4
COMMS: dict[str, Comm | None] = {"plain": None, "bf16": BF16, "zero++": PRESETS["zero++"]}
TOLERANCES = {"bf16": 0.002, "zero++": 0.04}  # of losses, as where FSDP2 is alone
KEEPING = {"in 8 bits": Comm(error_feedback=True), "in 16 bits": Comm(secondary_shard="bf16", gather_frozen="each")}


class Split(NamedTuple):
    """How ranks share the work, and how many of all are on a node."""

    dp_replicate_size: int
    fsdp_size: int
    tp_size: int
    on_node: int

    def recipe(self, train: str) -> Recipe:
        sizes = {name: size for name, size in self._asdict().items() if name != "on_node"}
        return Recipe(model="unused", datasets=[{"path": "unused"}], train=train, **sizes)

    def keys(self, comm: Comm | None) -> CommKeys:
        return CommKeys(comm and asdict(replace(comm, ranks_per_node=self.on_node)))


SPLITS = {
    4: [Split(1, 2, 2, on_node=2), Split(2, 2, 1, on_node=1)],
    8: [Split(1, 4, 2, on_node=4), Split(2, 4, 1, on_node=2), Split(2, 2, 2, on_node=2)],
}


class Trained(NamedTuple):
    losses: list[float]
    gradients: dict[str, Any]  # of the first step
    weights: dict[str, Any]


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Split, Any]]:
    """What every rank saw of each split."""
    folders = [saved(WIRING, tmp_path_factory.mktemp("base"), **sizes) for sizes in (SIZES, WIDE)]
    return run_on_ranks(on_ranks, request.param, *folders, SPLITS[request.param])


def on_ranks(folder: Path, wide: Path, splits: list[Split]) -> dict[Split, dict[str, Any]]:
    return {
        split: {name: train(folder, split, comm) for name, comm in COMMS.items()}
        | {name: kept(wide, split, comm) for name, comm in KEEPING.items()}
        for split in splits
    }


def train(folder: Path, split: Split, comm: Comm | None) -> Trained:
    recipe = split.recipe("all")
    model = load_student(recipe, folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    attached = split.keys(comm).attach(recipe, model, None)
    if attached is not None:
        attached.follow(optimizer)
    batch, losses, first = own_batch(split), list[float](), dict[str, Any]()
    for _ in range(STEPS):
        loss = model.train()(batch, labels=batch).loss
        loss.backward()
        losses.append(loss.item())
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, first, {name: whole(one).detach().numpy() for name, one in model.named_parameters()})


def own_batch(split: Split) -> torch.Tensor:
    rank, ranks = distributed.get_rank() // split.tp_size, distributed.get_world_size() // split.tp_size
    return tokens(ranks)[rank][None]


def kept(folder: Path, split: Split, comm: Comm) -> dict[str, tuple[float, float]]:
    """Bytes that this rank keeps where one of two layers is trained, and those that a dry run tells."""
    recipe = split.recipe("rewired")
    model = load_student(recipe, folder)
    attached = split.keys(comm).attach(recipe, model, None)
    assert attached is not None
    batch = own_batch(split)
    model.train()(batch, labels=batch).loss.backward()
    gathers = [group._all_gather_comm for _, _, group in _layers(model)]
    trained = list(attached.trained.values())
    held = {
        "secondary shard": [one.secondary for one in trained],
        "frozen weights gathered once": [one.secondary for one in gathers if one not in trained],
        "error feedback": [one.error for one in attached.gradients.values()],
    }
    told = split.keys(comm).memory(recipe, model, torch.float32, 0.0)
    return {
        name: (sum(tensor.nbytes for tensor in tensors if tensor is not None), told.get(name, 0.0))
        for name, tensors in held.items()
    }


@pytest.mark.parametrize("name", list(TOLERANCES))
def test_a_model_learns_what_it_does_without(name: str, found: list[dict[Split, Any]]) -> None:
    for one in found:
        for split, trained in one.items():
            losses = [torch.tensor(trained[each].losses) for each in (name, "plain")]
            torch.testing.assert_close(*losses, rtol=TOLERANCES[name], atol=0, msg=str(split))


def test_gradients_are_those_without_but_for_rounding(found: list[dict[Split, Any]]) -> None:
    for one in found:
        for split, trained in one.items():
            expected = trained["plain"].gradients
            scale = np.sqrt(sum((gradient**2).sum() for gradient in expected.values()))
            for name, gradient in expected.items():
                error = np.linalg.norm(trained["bf16"].gradients[name] - gradient)
                assert error < 0.01 * max(np.linalg.norm(gradient), 0.1 * scale), (split, name)


@pytest.mark.parametrize("name", list(COMMS))
def test_all_ranks_hold_the_same_model(name: str, found: list[dict[Split, Any]]) -> None:
    """Replicas and ranks that share a layer, which nothing would bring together again."""
    for split in found[0]:
        first, *others = [one[split][name].weights for one in found]
        for other in others:
            for weight in first:
                np.testing.assert_array_equal(other[weight], first[weight], err_msg=f"{split} {weight}")


@pytest.mark.parametrize("name", list(KEEPING))
def test_a_dry_run_tells_how_much_is_kept(name: str, found: list[dict[Split, Any]]) -> None:
    for one in found:
        for split, sizes in one.items():
            for part, (held, told) in sizes[name].items():
                assert told == pytest.approx(held, rel=0.1), (split, part)
    assert any(held > 0 for held, _ in found[0][SPLITS[len(found)][0]][name].values())
