"""`comm` beside replicas of a model and beside ranks that share its layers: they learn what they do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from rewired.comm.communication import Communication
from rewired.comm.nodes import Nodes
from rewired.comm.options import PRESETS, Comm
from rewired.ranks import run_on_ranks
from tests.rewired.sharded import gradients, saved, whole
from tests.rewired.tiny import tokens

from .slices import BF16

WIRING = [{"layers": "1-2", "preset": "ladder", "peek": True}]
SIZES = {"tp_shards": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}  # which 8 ranks can share
STEPS = 4
COMMS: dict[str, Comm | None] = {"plain": None, "bf16": BF16} | PRESETS
TOLERANCES = {"bf16": 0.002, "slow-link": 0.02, "zero++": 0.04}  # of losses, as where FSDP2 is alone


class Split(NamedTuple):
    """How ranks share the work, and how many of all are on a node."""

    dp_replicate_size: int
    fsdp_size: int
    tp_size: int
    on_node: int

    @property
    def ranks(self) -> int:
        return self.dp_replicate_size * self.fsdp_size * self.tp_size


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
    folder = saved(WIRING, tmp_path_factory.mktemp("base"), **SIZES)
    return run_on_ranks(on_ranks, request.param, folder, SPLITS[request.param])


def on_ranks(folder: Path, splits: list[Split]) -> dict[Split, dict[str, Trained]]:
    return {split: {name: train(folder, split, comm) for name, comm in COMMS.items()} for split in splits}


def train(folder: Path, split: Split, comm: Comm | None) -> Trained:
    sizes = split._asdict()
    on_node = sizes.pop("on_node")
    plan = "auto" if split.tp_size > 1 else None
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan=plan, **sizes)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    if comm is not None:
        size = Comm(ranks_per_node=on_node).node_size(split.fsdp_size, split.tp_size)
        nodes = Nodes.of(size, "cpu", split.dp_replicate_size, split.tp_size)
        Communication(model, comm, nodes).follow(optimizer)
    batch = tokens(split.ranks // split.tp_size)[distributed.get_rank() // split.tp_size][None]
    losses, first = [], dict[str, Any]()
    for _ in range(STEPS):
        loss = model.train()(batch, labels=batch).loss
        loss.backward()
        losses.append(loss.item())
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, first, {name: whole(one).numpy() for name, one in model.named_parameters()})


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
