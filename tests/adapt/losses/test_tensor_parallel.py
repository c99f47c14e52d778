"""Distillation on ranks that share each layer: losses, gradients and weights are those of one process."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from rewired.adapt.losses.distillation import add_losses
from rewired.adapt.losses.token_loss import TokenLoss
from rewired.adapt.model.teacher import beside, sharded
from rewired.adapt.model.trainable import choose, rewired_layers
from rewired.ranks import run_on_ranks
from tests.adapt.world import make_rewired
from tests.rewired.sharded import gradients, whole

WIRING = [{"layers": "1-2", "preset": "desync", "every": 2}, {"layers": "2-4", "preset": "ladder", "peek": True}]
STEPS, ROWS = 50, 4


class Trained(NamedTuple):
    losses: list[dict[str, float]]  # of every step; each summed over the rows of a rank
    gradients: dict[str, Any]  # of the first step
    weights: dict[str, Any]  # after the last one


def train(folder: Path, tp_size: int, fsdp_size: int, what: str) -> Trained:
    """Distil by AdamW for `STEPS` steps; each of `fsdp_size` ranks has a part of the rows."""
    if tp_size * fsdp_size == 1:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        choose(model, what)
        teacher = beside(model, folder)
    else:
        plan = "auto" if tp_size > 1 else None
        distributed = DistributedConfig(tp_size=tp_size, fsdp_size=fsdp_size, tp_plan=plan)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed)
        choose(model, what)
        teacher = sharded(model, folder, distributed=distributed)
        if fsdp_size > 1:
            assert all(isinstance(one, DTensor) for one in teacher.model.parameters()), "no rank holds all of it"
    add_losses(model, teacher, TokenLoss(ce=0.5, kd=1.0), 0.1, rewired_layers(model.config))
    rank = torch.distributed.get_rank() // tp_size if fsdp_size > 1 else 0
    mine = slice(rank * ROWS // fsdp_size, (rank + 1) * ROWS // fsdp_size)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=False)  # some of them are DTensors and some are not
    batches = torch.randint(3, 259, (2, ROWS, 11), generator=torch.Generator().manual_seed(0))
    told, first = list[dict[str, float]](), dict[str, Any]()
    for ids in islice(cycle(batches), STEPS):
        labels = ids.clone()
        labels[:, :3] = -100
        losses = model(input_ids=ids[mine], labels=labels[mine], distils=True)
        (losses.total * fsdp_size / (ROWS * 8)).backward()  # FSDP takes the mean of its ranks' gradients
        told.append({name: value.item() for name, value in losses._asdict().items()})
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(told, first, {name: whole(one).float().numpy() for name, one in model.named_parameters()})


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rewired", "all"])
@pytest.mark.parametrize(
    ("tp_size", "fsdp_size"),
    [(2, 1), (4, 1), (2, 2)],
)
def test_ranks_that_share_layers_learn_the_same(
    tp_size: int, fsdp_size: int, what: str, dense: Path, tmp_path: Path
) -> None:
    folder = make_rewired(dense, tmp_path / "m", WIRING)
    expected = train(folder, 1, 1, what)
    found = run_on_ranks(train, tp_size * fsdp_size, folder, tp_size, fsdp_size, what)
    for step, losses in enumerate(expected.losses):
        for name, value in losses.items():
            parts = [one.losses[step][name] for one in found]
            assert sum(parts) / tp_size == pytest.approx(value, rel=5e-4), f"{name} of step {step}"
    assert expected.losses[-1]["total"] < 0.7 * expected.losses[1]["total"], "of the same rows"
    scale = np.sqrt(sum((gradient**2).sum() for gradient in expected.gradients.values()))
    for one in found:
        assert one.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            error = np.linalg.norm(one.gradients[name] - gradient) / max(np.linalg.norm(gradient), 0.1 * scale)
            assert error < 1e-4, f"{name}: relative error {error:.2e}"
        for name, weight in expected.weights.items():
            np.testing.assert_allclose(one.weights[name], weight, rtol=1e-3, atol=1e-4, err_msg=name)
