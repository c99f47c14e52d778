"""A distilling step on ranks that share each layer: losses and gradients are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from rewired.adapt.distillation import add_losses
from rewired.adapt.losses import TokenLoss
from rewired.adapt.teacher import beside, sharded
from rewired.adapt.trainable import choose, rewired_layers
from rewired.ranks import run_on_ranks
from tests.rewired.sharded import gradients

from .world import make_rewired

pytestmark = pytest.mark.xdist_group("ranks")
WIRING = [{"layers": "1-2", "preset": "desync", "every": 2}, {"layers": "2-4", "preset": "ladder", "peek": True}]


def step(folder: Path, tp_size: int, fsdp_size: int, train: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Losses, summed over all rows, and every gradient; each of `fsdp_size` ranks has a part of the rows."""
    if tp_size * fsdp_size == 1:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        choose(model, train)
        teacher = beside(model, folder)
    else:
        plan = "auto" if tp_size > 1 else None
        distributed = DistributedConfig(tp_size=tp_size, fsdp_size=fsdp_size, tp_plan=plan)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed)
        choose(model, train)
        teacher = sharded(model, folder, distributed=distributed)
        if fsdp_size > 1:
            assert all(isinstance(one, DTensor) for one in teacher.model.parameters()), "no rank holds all of it"
    add_losses(model, teacher, TokenLoss(ce=0.5, kd=1.0), 0.1, rewired_layers(model.config))
    ids = torch.randint(3, 259, (4, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :3] = -100
    rank = torch.distributed.get_rank() // tp_size if fsdp_size > 1 else 0
    mine = slice(rank * 4 // fsdp_size, (rank + 1) * 4 // fsdp_size)
    losses = model(input_ids=ids[mine], labels=labels[mine], distils=True)
    (losses.total * fsdp_size).backward()  # FSDP takes the mean of its ranks' gradients
    return {name: value.item() for name, value in losses._asdict().items()}, gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["rewired", "all"])
@pytest.mark.parametrize(
    ("tp_size", "fsdp_size"),
    [(2, 1), (4, 1), (2, 2)],
)
def test_ranks_that_share_layers_learn_the_same(
    tp_size: int, fsdp_size: int, train: str, dense: Path, tmp_path: Path
) -> None:
    folder = make_rewired(dense, tmp_path / "m", WIRING)
    expected, expected_gradients = step(folder, 1, 1, train)
    found = run_on_ranks(step, tp_size * fsdp_size, folder, tp_size, fsdp_size, train)
    for name, value in expected.items():
        parts = [losses[name] for losses, _ in found]
        assert sum(parts) / tp_size == pytest.approx(value, rel=1e-4), name
    scale = np.sqrt(sum((gradient**2).sum() for gradient in expected_gradients.values()))
    for _, grads in found:
        assert grads.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            error = np.linalg.norm(grads[name] - gradient) / max(np.linalg.norm(gradient), 0.1 * scale)
            assert error < 1e-4, f"{name}: relative error {error:.2e}"
