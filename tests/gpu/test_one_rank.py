"""A process group of one rank (NCCL on a GPU, gloo on a CPU): our collectives run, and change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import rewired  # noqa: F401 - registers the classes
from rewired.bench.models import mesh_of
from rewired.ranks import run_on_ranks
from tests.rewired.sharded import Events, gradients, saved
from tests.rewired.test_tensor_parallel_training import assert_same
from tests.rewired.tiny import WIRINGS, tokens

pytestmark = pytest.mark.gpu
Answers = dict[str, Any]  # arrays by name
TIMEOUT_SECONDS = 120.0
TOLERANCE = 1e-4  # kernels of another shape round otherwise


@pytest.mark.parametrize("name", WIRINGS)
def test_logits_and_gradients_are_those_of_one_process(name: str, device: str, tmp_path: Path) -> None:
    folder = saved(WIRINGS[name], tmp_path)
    expected = answers(AutoModelForCausalLM.from_pretrained(folder).to(device))
    (found, all_reduces), *_ = on_one_rank(eager_answers, folder, device)
    assert all_reduces > 0
    assert_same(found, expected, TOLERANCE)


@pytest.mark.parametrize("name", ["ladder-peek", "partial-mean-overlap", "mixed"])
def test_so_are_they_compiled(name: str, device: str, tmp_path: Path) -> None:
    folder = saved(WIRINGS[name], tmp_path)
    expected = answers(AutoModelForCausalLM.from_pretrained(folder).to(device))
    (found,) = on_one_rank(compiled_answers, folder, device)
    assert_same(found, expected, TOLERANCE)


def on_one_rank(function: Any, folder: Path, device: str) -> list[Any]:
    return run_on_ranks(function, 1, folder, device, device_type=device, timeout_seconds=TIMEOUT_SECONDS)


def eager_answers(folder: Path, device: str) -> tuple[Answers, int]:
    """With how many all-reduces the forward of a training runs."""
    model = split(folder, device)
    with Events() as events:
        model(tokens().to(device))
    return answers(model), len(events.payloads)


def compiled_answers(folder: Path, device: str) -> Answers:
    model = split(folder, device)
    return answers(model, torch.compile(model, fullgraph=True))


def split(folder: Path, device: str) -> Any:
    """The checkpoint as it is on one of several ranks, although there is one only."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    several = DistributedConfig(tp_size=2, tp_plan="auto")  # for one rank, transformers has no plan
    plan = model._resolve_parallel_plans(several)[0]
    apply_tensor_parallelism(model, mesh_of(distributed.group.WORLD, device), plan)
    return model


def answers(model: Any, run: Any = None) -> Answers:
    """Logits without gradients, and every gradient of a training step."""
    run = model if run is None else run
    batch = tokens().to(model.device)
    with torch.no_grad():
        logits = run(batch).logits
    run(batch, labels=batch).loss.backward()
    return gradients(model) | {"logits": logits.cpu().numpy()}
